"""Where commands run.

base         the Sandbox protocol, limits and results
interpreter  where this Python lies
cgroup       control groups that limit processes and memory
user_limit   the user's own limit on processes
channel      messages to the server inside, and what they may be
served       what all sandboxes have in common: a server inside that outlives calls
bwrap        commands in namespaces of their own, by bubblewrap
docker       commands in a container
local        commands as plain processes, without isolation
factory      makes the sandbox that was chosen
inside/      the programs that run inside a sandbox
"""
