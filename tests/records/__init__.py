"""Tests of records/: records, journals, the index, scores."""
