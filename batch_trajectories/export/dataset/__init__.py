"""The datasets of `export --format`.

directory  the directory, its manifest, files for loaders, uploads
build      from records to rows
runs       the records of one run or several
choice     what caps, balance and shares of runs keep, and the order
values     values of columns and metadata
splits     which split a conversation is in
lengths    lengths in the tokens of the model that is trained
card       the dataset card
checking   compares a dataset with its records
remote     a dataset in a bucket

Other rooms import build, checking, directory, remote, runs.
"""
