"""The index of a run: facts of its records as columns, so that a page can filter a million."""
