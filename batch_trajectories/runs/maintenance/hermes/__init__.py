"""Import a batch run of hermes-agent.

importer  its files to records
sharegpt  its trajectories to events
"""
