"""Starts and reads runs from Python. The commands use this, too."""
