"""Limits that several runs share, through a directory or a bucket."""
