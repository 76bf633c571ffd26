"""How sure we are: intervals, paired differences, resampling, sequential looks and regression."""
