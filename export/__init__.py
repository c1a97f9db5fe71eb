"""Records become training files: pure conversions, and the rules a row must keep."""
