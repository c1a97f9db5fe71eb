"""Finished and stopped runs: verify, repair, merge, fork."""
