"""Tests of `check`, which judges finished conversations again."""
