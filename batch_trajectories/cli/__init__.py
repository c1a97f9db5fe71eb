"""The commands of batch_runner.py: from options to an exit code."""
