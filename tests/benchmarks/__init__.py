"""Measurements on loopback endpoints. The product never imports this package."""
