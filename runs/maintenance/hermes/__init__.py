"""Taking over batch runs of hermes-agent."""
