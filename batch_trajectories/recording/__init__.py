"""Record the model calls of programs that others run: the command `record`."""
