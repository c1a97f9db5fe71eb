"""Publications: a dataset with all that somebody else needs to make it again."""
