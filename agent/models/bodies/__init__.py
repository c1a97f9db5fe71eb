"""Bodies of requests and replies: what the dialects share.

dialect         what a dialect is; all of them by name
endings         why a reply ended
assembly        from the events of a stream to the body of a whole reply
token_ids       token ids and log-probabilities of the chat dialect
unknown_fields  fields that a reply holds beyond those that we know

Other rooms import all modules.
"""
