"""Checks with real programs, started by hand and in CI: agents, sessions, servers and trainers."""
