"""Models around a model: they change the messages it is shown, never the record.

views        shortens older turns; adds messages that are not recorded
summary      shows older messages as a summary
react        tool calls as text, for models without tool calling
preparation  a conversation before the main one
"""
