"""The index of a run: facts of its records as columns, so that a million can be filtered at once.

run_index  the index of a run, kept up to date
parts      its files
run_texts  the text index of a run, made when somebody searches
texts      its files
facts      what is known of a whole run, as the report says it
differences  how two runs differ
making     what other processes make
columns    facts of a record as columns
table      the columns as a table
filters    filters of a request
charts     numbers of the rows that match
"""
