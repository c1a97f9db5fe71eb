"""Messages, as they are stored, and what is in them.

message       messages and events
parts         parts of messages that are not text
reasoning     reasoning inside the text of a reply, and encrypted reasoning
leaked_calls  tool calls in texts, which a server did not read
tokens        token ids and log-probabilities as they were sampled

Other rooms import all modules.
"""
