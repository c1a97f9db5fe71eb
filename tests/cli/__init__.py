"""Tests of cli/: what commands print."""
