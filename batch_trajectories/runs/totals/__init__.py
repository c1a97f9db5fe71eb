"""Totals of a run, computed from disk.

run_totals  tasks done, failed, discarded and pending; tokens, cost
spending    all that the run has spent
forecast    time and cost of the whole run, from a sample
"""
