"""What parent and workers say to each other.

messages      the messages, and what a worker is started with
record        the record of a finished task

Other rooms import messages, record.
"""
