"""Tests of agent/gateway/: the model calls of agents that run as commands.

relaying       a gateway between an endpoint and an agent that tests play
test_relay     what reaches the endpoint and the agent, and in which order
test_gateway   what the gateway answers itself
"""
