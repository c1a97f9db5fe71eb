"""From what a user names as a dataset to rows, and from rows to tasks."""
