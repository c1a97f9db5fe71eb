"""Tests of report/: the report page."""
