"""What is specific to transformers models: attention hook, unrolled and packed passes, precision, and their proof."""
