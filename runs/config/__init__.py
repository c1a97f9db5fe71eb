"""The options of a run, from YAML and flags to checked values."""
