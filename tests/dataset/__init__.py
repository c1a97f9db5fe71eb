"""Tests of dataset/: sources, rows and their columns, the scan."""
