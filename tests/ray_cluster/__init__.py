"""Tests of ray_cluster/ that need no Ray."""
