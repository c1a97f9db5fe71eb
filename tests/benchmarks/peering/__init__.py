"""What runs inside the environments of `tests.benchmarks.peers`; imports nothing of ours."""
