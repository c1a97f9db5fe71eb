"""Scores for the records of a run, given after it.

score_file    scores.jsonl: what has a score, and appending
by_functions  scores of reward functions
by_judge      scores of a judge model, and the budget of its calls
asking        keeps calls in flight
judge_prompt  the questions to the judge, and its replies
rechecks      which conversations `check` can judge again, and from what

Other rooms import by_functions, by_judge, judge_prompt, rechecks, score_file.
"""
