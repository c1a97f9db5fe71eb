"""From a dataset file to tasks.

lines       the lines of the file as rows
column_names  the names of the columns that mean something
row         the columns of a row, and the conversation that it starts
row_image   the container image of a row
row_files   the files and paths that rows name
row_check   the check of a row
row_setup   the files, commands and check of a row
row_user    the further messages of the user, and who a simulated user is
test_outcomes  which tests passed, from the output of a check
row_fork    the conversation that a row branches from
shards      parts of a dataset by prompt id
scan        one pass over the file: row offsets and task keys
scan_cache  dataset.idx: the scan, for the next start

Other rooms import column_names, lines, row, row_check, row_files, row_fork, row_image, row_setup,
scan, scan_cache, shards, test_outcomes.
"""
