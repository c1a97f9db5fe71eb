"""Tests of batch_api/: waves of the Batch API, with a crash at each step."""
