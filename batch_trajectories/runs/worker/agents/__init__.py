"""Agents that run as commands.

agent_runner  runs one, from its start to its end
"""
