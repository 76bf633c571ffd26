"""Programming problems, verified by running tests."""
