"""What we know about transformers models: attention hook, written-out and packed passes, precision, and their proof."""
