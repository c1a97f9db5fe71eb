"""The index of a run: facts of its records as columns, so that a million can be filtered at once."""
