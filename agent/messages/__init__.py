"""Messages in their stored form, and functions that read their content."""
