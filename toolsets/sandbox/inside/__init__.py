"""What runs inside a sandbox, as programs of their own; they import nothing outside this folder.

In a container the server is run by the Python of the image, so it uses only the standard
library of Python 3.8. `toolsets.sandbox.programs` starts programs from their source.

boot         reads the programs and runs them
outputs      the beginning and the end of an output
processes    the processes below ours, and the size of a workspace
job          one running command or session
shells       how a persistent shell takes commands
kernel       the persistent Python interpreter
file_requests  the files of an image
server       answers the requests of the worker
namespaces   separates a forked sandbox from the machine and from others
fork_server  forks sandboxes, each with a server
system_calls  what the kernel refuses to all commands
forward      starts a command whose model calls leave through a socket
acp          gives a task to an agent by the Agent Client Protocol
"""
