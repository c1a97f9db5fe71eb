"""What a run keeps on disk: journals, records, failures, their index."""
