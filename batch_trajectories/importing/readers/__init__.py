"""Readers of the files of other programs: one module per format, found by its name.

A module has a `READER`; see `Reader` in `importing/conversation.py`.
"""
