"""What parent and workers say to each other.

messages      the messages, and what a worker is started with
record        the record of a finished task
parser_signs  what replies say of the parsers of their server

Other rooms import messages, parser_signs, record.
"""
