"""Trying out an agent that runs as a command, before anything is paid.

checking     runs an agent, kills it, starts it again, and says what would go wrong
endpoint     a model on loopback that has an agent run two commands
replies      replies of a model in each API, and which tool runs commands
differences  where two requests of one agent differ, and how to say that it does not matter

Other rooms import checking.
"""
