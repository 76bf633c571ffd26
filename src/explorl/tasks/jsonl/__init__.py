"""Problems from JSON lines files."""
