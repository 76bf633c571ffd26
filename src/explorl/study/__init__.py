"""Studies: run arms × seeds, a process each, and compare them in one table with intervals."""
