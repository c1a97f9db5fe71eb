"""The files of a run: records, journals, failures, scores and their index."""
