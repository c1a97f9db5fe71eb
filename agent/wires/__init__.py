"""What agents that run as commands ask: their requests, read, compared and sorted.

These modules only compute; they do no I/O.
"""
