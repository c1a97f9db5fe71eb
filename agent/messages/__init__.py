"""Messages, as they are stored, and what is in them."""
