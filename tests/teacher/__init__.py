"""Log-probabilities of another model for recorded token ids."""
