"""Limits that several runs share, through a directory or a bucket.

test_ledger   who may spend how much, and at what rate
test_shards   shards of a dataset, killed at random
"""
