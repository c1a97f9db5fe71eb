"""All toolsets, and the selection of a task's toolsets."""
