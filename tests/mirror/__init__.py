"""Runs with a mirror, and URLs: directories by `file://`, and emulators where there are some.

test_lease          one writer at a time; what comes back from a mirror
test_mirrored_runs  whole runs: machines that go, two starts at once
test_buckets        S3 by moto, Azure by Azurite, and what Google's client asks of moto
test_bucket_faults  whole runs whose bucket is slow, cuts connections or refuses
test_urls           datasets and exports at URLs
emulators           the emulators
proxy               counts requests before an emulator, and fails
holding             a process that takes and loses the lease
"""
