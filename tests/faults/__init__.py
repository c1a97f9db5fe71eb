"""The fault matrix of README.md, row by row."""
