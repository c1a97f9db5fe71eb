"""Scores and checks after a run: the commands `score` and `check`."""
