"""Whether a chat template trains what inference saw, for `export --parity`.

mending    the options after which nothing differs
judging    judges a dataset, in a process with bounded time and memory

Other rooms import judging.
"""
