"""Calls by the providers' Batch APIs, in the parent.

service    the door: a thread with an event loop
collector  gathers calls into jobs
delivery   sees one job through
batch_log  batches.jsonl: each step on disk before the next
totals     what the batches brought
"""
