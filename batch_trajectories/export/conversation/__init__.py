"""A record read into a conversation that every format can render.

turns      a Conversation and its parts
reading    parses a record into a Conversation
usual      the same in one pass, for conversations of the usual shape
authors    who wrote each message; messages of agents in an order that rows can have
leaks      calls that look where the solution may lie
validity   rules that every row keeps
tolerance  rules that a user can relax
metadata   the metadata of a row
ending     final answers given by a call, as text
own_work   what the model itself did
row_json   reading and writing the JSON of rows
rewards    rewards by name
style      options for reasoning, parallel calls, long results and tools
tools      values computed once per list of tools
texts      the texts of a conversation, for filters; its diff

Other rooms import authors, ending, leaks, metadata, own_work, reading, rewards, row_json,
style, texts, tolerance, tools, turns, validity.
"""
