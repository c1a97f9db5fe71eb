"""The parent process of a run: it assigns tasks, shares out limits and writes the records."""
