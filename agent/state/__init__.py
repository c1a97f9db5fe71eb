"""The state of a conversation, which is a fold of its events.

call_ids      makes the ids of calls unique
events        makes events, with their times
sums          tokens and dollars of replies
agent_record  what an agent's calls add to a record
trajectory    the fold: live, on resume and from a record
tally         counts for the rules
history       checks messages that a conversation starts with
final_answer  the reserved tools that end a conversation
forking       the events that branches have from their parent
transcript    a JSONL file of one conversation

Other rooms import call_ids, events, final_answer, forking, history, trajectory, transcript.
"""
