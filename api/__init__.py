"""Runs from Python: start one, read one. The commands are made of this.

start       run a config to its end, and how it ended
stored_run  a run on disk, read while it works or afterwards
in_flight   what the conversations in flight are doing
results     the training files and the summary of a run

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
    "results",
    "start",
    "stored_run",
)
