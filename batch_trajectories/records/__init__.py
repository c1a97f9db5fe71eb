"""The files of a run.

tasks           Task, BadRow and task keys
files           append to, replace and repair files
checksum        checksums of lines
journal         read the journals of conversations in flight
journal_writer  write them, with group commit
records         records.jsonl
record_types    the types of a record's fields
record_parts    small ones of them
row_texts       long texts that row and messages share
index           records.idx, derived from records.jsonl
index_file      which bytes of it can be trusted
reader          read records one by one
failures        failures.jsonl; which tasks need no more work
scores          scores.jsonl: scores and checks after the run
checks          results of checks, rewards by name and by turn, and their sums

Other rooms import checks, checksum, failures, files, index, index_file, journal, journal_writer,
reader, record_parts, record_types, records, row_texts, scores, tasks.
"""
