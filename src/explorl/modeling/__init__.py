"""What we know about transformers models: attention hook, unrolled and packed passes, precision, and their proof."""
