"""The datasets of `export --format`.

directory  the directory, its manifest, files for loaders, uploads
build      from records to rows
card       the dataset card
checking   compares a dataset with its records
rendering  renders rows through a chat template

Other rooms import build, checking, directory, rendering.
"""
