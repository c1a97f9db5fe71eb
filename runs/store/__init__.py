"""What a run keeps on disk.

files           appending, replacing and repairing files
checksum        checksums of lines
journal         reading the journals of conversations in flight
journal_writer  writing them, with group commit
records         records.jsonl
index           records.idx, derived from it
reader          records read one by one
failures        failures.jsonl
settled         which tasks need no more work
checks          what the rows' checks said, in record and index
"""
