"""A sandbox of batch-trajectories whose commands run on machines of E2B.

The machines are those of the service, or of a server of your own that speaks the same HTTP API.
"""
