"""Runs from Python: start them and read them. The commands use this, too."""
