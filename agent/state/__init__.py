"""The state of a conversation, which is a fold of its events.

events        making events, with their times
trajectory    the fold: live, on resume and from a record
tally         counts for the rules
history       messages that a conversation begins with
final_answer  ending a conversation by a tool call
forking       the beginning that branches share
transcript    a JSONL file that grows with a conversation
"""
