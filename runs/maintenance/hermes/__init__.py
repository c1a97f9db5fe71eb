"""Taking over a batch run of hermes-agent.

importer  its files as records
sharegpt  its trajectories as events
"""
