"""Tests of agent/: one conversation, in one process.

models/               model clients
gateway/              model calls of agents that run as commands
test_agent            AIAgent
test_session          sessions: forks, cancellation, transcripts, stream events
test_simulated_user   several messages of the user, of rows and of a model
test_simple_loop      `agent_loop` with plain functions
test_flat             the flat message format
test_loop             the loop with the scripted model and real tools
test_options          options of a conversation
test_command_agent    an agent that runs as a command, and what a row changes of it
test_leaked_calls     calls that a server left in a text
test_rules            rules that continue or end a conversation
test_deadline         `max_conversation_s`
test_react            the text protocol of models without tool calling
test_properties       properties that hold for every conversation, by generated examples
test_seeds_loop       behaviours of the seed documents, in the loop
test_seeds_session    behaviours of the seed documents, in sessions
"""
