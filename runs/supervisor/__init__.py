"""The parent process at work: workers, tasks, limits, budget, progress."""
