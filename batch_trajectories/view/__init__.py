"""The server of `view`: a page for all runs, alive, where people decide what is training data."""
