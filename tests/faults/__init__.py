"""What can happen to a run, row by row of the table in docs/reliability.md."""
