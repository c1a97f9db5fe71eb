"""The report page: one HTML file with its data.

All but source.js is also the page of `batch_trajectories.view`, whose source is a server.
"""
