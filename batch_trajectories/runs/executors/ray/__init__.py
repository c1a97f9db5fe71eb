"""Workers as Ray actors.

executor       starts actors, and watches for their deaths
worker_handle  the parent's handle of an actor
actor          the actor, on its node, and the digest of its code
tcp            the connection between parent and actor
"""
