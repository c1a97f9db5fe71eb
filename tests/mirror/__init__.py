"""Runs with a mirror, in directories by `file://`.

test_lease          one writer at a time; what comes back from a mirror
test_mirrored_runs  whole runs: machines that go, two starts at once
holding             a process that takes and loses the lease
"""
