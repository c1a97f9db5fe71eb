"""Judging conversations again, for `check`.

keeping         keeps the workspace of a finished conversation
recheck_runner  rebuilds the workspace of a record and judges it
"""
