"""What parent and workers say to each other.

messages      the messages
worker_setup  what a worker is started with
"""
