"""The loop: decide the next step, take it, until the conversation ends.

steps         all kinds of steps
rules         decides the next step, by pure functions
loop          takes the steps
acceptance    checks a reply before it becomes part of the conversation
tools         the toolbox, and the wrappers that options put around it
references    earlier results by name in arguments
subagents     agents as tools
simulated_user  a model that plays the user
plan          plans and their steps
"""
