"""Helpers for all folders: errors, text, JSON, checks of values, processes."""
