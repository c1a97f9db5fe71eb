"""Workers as Ray actors.

executor       places actors, and hears of their deaths
worker_handle  the parent's side of one
actor          what runs on the node
tcp            the connection between them
code_digest    whether both run the same code
"""
