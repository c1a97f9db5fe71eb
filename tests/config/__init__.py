"""Tests of config/: options, config files, endpoints."""
