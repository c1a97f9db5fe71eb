"""`agents check`: an agent is tried out before anything is paid.

test_checking     agents that conform, and agents with one fault each
test_differences  differences between requests, and the advice that has them ignored
test_replies      replies are what the readers of each API read
"""
