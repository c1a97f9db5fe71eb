"""Loopback stand-ins and measurements; nothing of the product imports this package."""
