"""What a run comes to, computed from disk."""
