"""Rewards that are given after a run: the commands `score` and `check`."""
