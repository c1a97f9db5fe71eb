"""The formats of training rows. Each module is a format and has its name.

The first line of a module is its description in `export --help`. `FORMAT` is the format; see
`export/rows/format.py`.
"""
