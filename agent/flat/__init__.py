"""Conversations as flat lists of messages, for callers with a loop of their own.

format       the flat form and its functions
convert      to and from our messages and those of the APIs
simple_loop  agent_loop: a loop over the flat form, with a function as model
"""
