"""Model calls of agents that run as commands: relayed to the run's endpoint, and recorded.

wire            requests of agents, as they were read
canonical       digests of messages and requests without what changes from start to start
reading         reads the bodies of requests
wire_base       a dialect as agents speak it: what the four have in common
wire_chat       OpenAI chat completions
wire_messages   Anthropic messages
wire_responses  OpenAI Responses
wire_gemini     Gemini's generateContent
wires           the dialects by name
conversations/  what an agent's calls become
answers         replies on their way to agents, and who asked for them again
listing         lists of models
sending         what is sent to the endpoint for a call
relay           makes the calls of an agent, and records them
server          the HTTP server that agents talk to

The modules before `answers` only compute; they do no I/O.
"""
