"""`export --format`: a dataset directory with card, manifest and splits."""
