"""Data sets of reasoning-gym."""
