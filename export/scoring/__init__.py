"""Scores for the records of a run, given after it.

score_file    scores.jsonl: what has a score, and appending
by_functions  scores of reward functions
"""
