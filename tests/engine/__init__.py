"""Tests of engine/: limits, budgets, steering, stopping, suspects, checks and rewards."""
