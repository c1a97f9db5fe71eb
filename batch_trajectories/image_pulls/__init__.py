"""The images that the rows of a dataset name, fetched before and while a run works."""
