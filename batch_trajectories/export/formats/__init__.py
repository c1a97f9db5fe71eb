"""The formats of training rows: each module is one, and has its name.

The first line of a module is what `export --help` says of it, and `FORMAT` is the format: see
`export/rows/format.py`.
"""
