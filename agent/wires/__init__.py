"""What agents that run as commands ask: their requests, read, compared and sorted.

wire           requests of agents, as they were read
canonical      digests of messages and requests without what changes from start to start
reading        reads the bodies of requests
wire_base      a dialect as agents speak it: what the four have in common
wire_chat      OpenAI chat completions
wire_messages  Anthropic messages
wire_responses  OpenAI Responses
wire_gemini    Gemini's generateContent
wire_plain     OpenAI's embeddings and legacy completions
wires          the dialects by name
lines          events of conversations, as they are stored
repeats        replies that agents repeat
shown          what a request shows otherwise than its thread has it
thread         the messages of one conversation, and their digests
threads        which conversation a call continues

These modules only compute; they do no I/O.

Other rooms import canonical, lines, reading, shown, threads, wire, wire_base, wire_responses,
wires.
"""
