"""Show runs to people."""
