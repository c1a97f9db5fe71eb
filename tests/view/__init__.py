"""Tests of view/: the page for all runs, and its server.

test_access   who is answered: tokens, other sites, other names, paths
test_answers  rows, charts, conversations, labels of a real run
test_index    the index of a run that grows, is repaired, damaged or gone
test_alive    a run that works: events, the tail of a conversation, steering
test_page     the page in a browser

serving       starts the server for tests
page_runs     runs to look at in the page
"""
