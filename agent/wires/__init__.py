"""Requests of agents that run as commands: reading them, and grouping them into conversations.

These modules only compute; they do no I/O.
"""
