"""Workers as Ray actors.

executor       starts actors, and watches for their deaths
worker_handle  the parent's handle of an actor
actor          the actor, on its node
tcp            the connection between parent and actor
code_digest    checks whether both run the same code
"""
