"""Which toolsets there are, and which a task gets."""
