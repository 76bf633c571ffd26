"""Multiple-choice questions."""
