"""The state of a conversation, which is a fold of its events.

events        makes events, with their times and unique ids of calls
agent_record  what an agent's calls add to a record
trajectory    the fold: live, on resume and from a record
tally         counts for the rules; sums of tokens and dollars
history       checks messages that a conversation starts with
final_answer  the reserved tools that end a conversation

Other rooms import events, final_answer, history, tally, trajectory.
"""
