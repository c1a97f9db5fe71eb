"""Agents that run as commands, in a worker.

agent_runner   runs one conversation of such an agent
agent_program  how an agent's program is started in its sandbox
reasons        why an agent has failed, and what to do
users          the further messages of its user
installed      where a program of the user's is, and what it needs to run
"""
