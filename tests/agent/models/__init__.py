"""Tests of agent/models/: requests, replies, errors."""
