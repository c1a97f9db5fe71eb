"""Workers as Ray actors.

executor       starts actors, and watches for their deaths
worker_handle  the parent's handle of an actor
actor          the actor, on its node; the digest of its code; the connection to it
"""
