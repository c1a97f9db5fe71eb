"""From a dataset file to tasks.

lines       lines of the file as rows
row         what a row may hold, and the conversation it asks for
row_setup   files, commands and the check of a row
row_fork    the beginning that a row brings along
scan        one pass: where rows lie and which tasks they are
scan_cache  dataset.idx, for the next start
"""
