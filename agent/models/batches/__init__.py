"""Clients of the providers' Batch APIs."""
