"""Tests of toolsets/: what tools do, how they are found, and what confines them."""
