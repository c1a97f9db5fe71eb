"""Tests of maintenance/: verify, repair, merge, fork."""
