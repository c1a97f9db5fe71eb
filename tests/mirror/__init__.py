"""Runs with a mirror, and URLs: directories by `file://`, and emulators where there are some."""
