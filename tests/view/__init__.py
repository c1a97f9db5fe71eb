"""Tests of view/: the server of the page for all runs.

serving      starts the server for tests
"""
