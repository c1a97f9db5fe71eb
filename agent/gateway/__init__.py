"""Model calls of agents that run as commands: relayed to the run's endpoint, and recorded."""
