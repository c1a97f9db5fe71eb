"""Tests of view/: the page for all runs, and its server."""
