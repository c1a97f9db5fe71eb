"""The prompts: lines, rows, and the scan that finds the tasks."""
