"""Whether a chat template trains what inference saw, for `export --parity`.

templates  finds templates by name, directory or file
contexts   renders rows, and compares each turn's context
mending    the options after which nothing differs
judging    judges a dataset, in a process with bounded time and memory

Other rooms import judging, templates.
"""
