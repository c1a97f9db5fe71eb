"""Runs of earlier commits, which must go on and read as they did.

Each folder is named after a commit. It has a complete run with its training file, one that was
killed, and one with failed attempts. `exports.json` has the hashes of files that an earlier commit
exported of the complete ones.
"""
