"""The tools of the toolsets `file`, `terminal` and `python`."""
