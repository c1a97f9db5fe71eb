"""What runs inside a sandbox, as programs of their own; they import nothing outside this folder.

In a container they are run by whatever Python the image holds, so they use only the standard
library of Python 3.8, and little of it, since each task has them once. `toolsets.sandbox.served`
starts them from their source.

boot       reads the programs and runs them
outputs    the beginning and the end of an output
processes  the processes below ours, and the size of a workspace
job        one running command or session
shells     how a persistent shell takes commands
kernel     the persistent Python interpreter
server     answers the requests of the worker
"""
