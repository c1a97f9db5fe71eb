"""Runs of earlier commits, which must go on and read as they did.

cc79584/, 837301e/     a complete run with its training file, and one that was killed
finished.*, killed.*   their datasets and options
tools.py               their tools
make.py                makes the runs of a commit
test_stored_runs.py    resumes, verifies and exports them
"""
