"""Tests of export/: rows in every format, filters, datasets."""
