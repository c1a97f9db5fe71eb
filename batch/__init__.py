"""A run: its config, prompts, directory, workers and accounts."""
