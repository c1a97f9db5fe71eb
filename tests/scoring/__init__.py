"""Tests of `check`, which judges finished conversations again.

test_reasons  which conversations can be judged again, and from what; what readers see afterwards
test_kills    many conversations of a model, killed again and again
test_kinds    rows in images, agents that are commands, and what can go wrong
"""
