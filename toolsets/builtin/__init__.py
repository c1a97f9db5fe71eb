"""The tools `file`, `terminal` and `python`."""
