"""Tests of `check_tasks` and what uses its verdicts."""
