"""Mathematical problems and the judge of their answers."""
