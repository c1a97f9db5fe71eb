"""Models around a model: they change what it is shown, never what is recorded.

views        older turns in short
summary      older messages as a summary
react        tool calls as text, for models without them
preparation  a conversation before the main one
"""
