"""What all folders use: errors, text, JSON, checks of values, processes."""
