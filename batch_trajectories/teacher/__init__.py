"""Log-probabilities of another model, the teacher, for recorded token ids: `score --teacher`."""
