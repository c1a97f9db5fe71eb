"""What a start would do, checked before any call.

plan      all checks of a start
logprobs  what is said of log-probabilities before the first call
preview  what a dry run shows
"""
