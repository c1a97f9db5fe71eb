"""Sandboxes that are containers.

engine     Docker or Podman, asked through its command line
leftovers  containers that a run has left, and their names
docker     commands in a container
"""
