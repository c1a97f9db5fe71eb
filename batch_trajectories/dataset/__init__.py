"""Reads the dataset that a user names: its rows, and the tasks that they become."""
