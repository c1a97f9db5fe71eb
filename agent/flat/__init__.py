"""Conversations as flat lists of messages, for callers with a loop of their own.

format       the flat form and its functions
convert      to and from the messages of the APIs
simple_loop  a small loop over the flat form
"""
