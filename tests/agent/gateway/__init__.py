"""Tests of agent/gateway/: the model calls of agents that run as commands.

talking              agents as they talk to a model, and a gateway without connections
test_wires           requests are read, replies are written
test_clients         the providers' own clients take what is written
test_threads         calls become conversations
test_agent_tokens    token ids of calls
test_repeats         replies that agents repeat in other words
test_continuing      calls that continue a response by its id
test_stored_responses  responses in the background, and others that are asked for by their ids
test_plain_calls     embeddings and legacy completions; how requests are packed
test_pointing        what requests only point at, under a budget
test_agent_journals  calls in the journals of a run
relaying             a gateway between an endpoint and an agent that tests play
test_relay           what reaches the endpoint and the agent, and in which order
test_gateway         what the gateway answers itself
"""
