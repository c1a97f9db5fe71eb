"""Tests of publishing/: what is published, and whether a copy of it is whole."""
