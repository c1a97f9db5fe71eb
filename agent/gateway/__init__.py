"""Model calls of agents that run as commands: relayed to the run's endpoint, and recorded.

command_agent  an agent that users run as a command
task_servers   MCP servers of a task, as agents are told of them
answers        replies on their way to agents, who asked for them again; lists of models
sending        what is sent to the endpoint for a call
pointing       what a request only points at: its most tokens, or a refusal under a budget
stored_responses  responses that agents ask for by their ids, such as those made in the background
relay          makes the calls of an agent, and records them
stalls         whether it repeats a call with the same result
server         the HTTP server that agents talk to

Other rooms import answers, command_agent, relay, server.
"""
