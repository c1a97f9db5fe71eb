"""The datasets of `export --format`."""
