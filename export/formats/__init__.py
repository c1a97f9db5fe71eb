"""The formats of training rows."""
