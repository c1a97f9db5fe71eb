"""The datasets of `export --format`.

directory  the directory, its manifest, files for loaders
build      from records to rows
card       the dataset card
checking   compares a dataset with its records
rendering  renders rows through a chat template
pushing    uploads to the Hugging Face hub

Other rooms import build, checking, directory, pushing, rendering.
"""
