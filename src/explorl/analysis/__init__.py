"""What runs and checkpoints show."""
