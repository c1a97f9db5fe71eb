"""The loop: decide the next step, take it, until the conversation ends.

steps         the steps there are
rules         which step is next; pure
loop          takes the steps
acceptance    what happens to a reply before it counts
tools         the toolbox with what options put around it
references    earlier results by name in arguments
subagents     agents as tools
user_replies  tools that ask the user
plan          plans and their steps
opening       what is added to the first messages
resume        what a crash interrupted
"""
