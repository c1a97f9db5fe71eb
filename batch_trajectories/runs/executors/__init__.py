"""Start workers.

base   the supervisor's handle of a worker
local  workers as processes of this machine
ray/   workers as actors on a Ray cluster

Other rooms import base, local, ray/executor.
"""
