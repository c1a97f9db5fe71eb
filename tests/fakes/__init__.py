"""Fake endpoints and other parts that tests and benchmarks share. The product never imports it."""
