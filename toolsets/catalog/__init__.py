"""All toolsets, and the choice of those a task gets."""
