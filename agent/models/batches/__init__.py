"""The providers' Batch APIs."""
