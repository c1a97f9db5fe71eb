"""Training files and datasets, made from the records of runs."""
