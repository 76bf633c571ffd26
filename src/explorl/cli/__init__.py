"""The explorl command: one module per group of commands."""
