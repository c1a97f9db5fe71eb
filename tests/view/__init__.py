"""Tests of view/: the page for all runs, and its server.

test_page     the page in a browser

serving       starts the server for tests
page_runs     runs to look at in the page
"""
