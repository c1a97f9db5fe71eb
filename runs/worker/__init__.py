"""What runs in a worker process."""
