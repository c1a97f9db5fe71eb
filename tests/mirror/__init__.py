"""Runs with a mirror: directories by `file://`, and emulators of buckets where there are some.

test_lease          one writer at a time; what comes back from a mirror
test_mirrored_runs  whole runs: machines that go, two starts at once
test_buckets        S3 by moto, Azure by Azurite
holding             a process that takes and loses the lease
"""
