"""Calls by the providers' Batch APIs, in the parent.

service    runs the rest in a thread with an event loop
collector  gathers calls into jobs, and answers them
delivery   sends a job, waits for it, fetches its results
batch_log  batches.jsonl: each step on disk before the next
totals     totals of the batches

Other rooms import batch_log, service, totals.
"""
