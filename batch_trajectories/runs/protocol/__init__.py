"""What parent and workers say to each other.

messages      the messages
batch_calls   ids of calls by the Batch API
worker_setup  what a worker is started with
record        the record of a finished task

Other rooms import all modules.
"""
