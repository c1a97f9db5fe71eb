"""Which conversations become training rows."""
