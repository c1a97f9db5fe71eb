"""Agents that are commands of their own: running them in a worker, and `agents --check`."""
