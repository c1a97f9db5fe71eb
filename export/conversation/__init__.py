"""A record read into a conversation that every format can render.

reading    Conversation, and reading a record into it
validity   rules that every row keeps
tolerance  rules that a user may have relaxed
views      what of a conversation its model saw in short
ending     final answers given by a call, as text
own_work   what the model itself did
row_json   JSON as it stands in rows
style      reasoning, parallel calls and long results, as asked for
tools      what is made once of tools that many conversations share
texts      the texts of a conversation, for filters
"""
