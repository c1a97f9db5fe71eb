"""What runs inside the environments of `benchmarks.peers`; imports nothing of ours."""
