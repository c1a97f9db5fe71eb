"""Calls by the providers' Batch APIs: `--batch_api`."""
