"""Where workers run.

base   the handle of a worker, whatever its place
local  processes of this machine
ray/   actors on a Ray cluster
"""
