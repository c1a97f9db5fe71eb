"""Sandboxes that are containers.

engine  Docker or Podman, asked through its command line
docker  commands in a container
"""
