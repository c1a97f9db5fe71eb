"""A worker process: many conversations in one event loop."""
