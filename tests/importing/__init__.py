"""Tests of importing/: conversations of other programs."""
