"""Tests of agent/gateway/: the model calls of agents that run as commands."""
