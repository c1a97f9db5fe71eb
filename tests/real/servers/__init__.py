"""A real inference server and a real trainer against our rows: `python -m tests.real.servers`.

__main__   installs both, trains a model, serves it, runs prompts and compares
wire       a forwarder that keeps what the server sent
training   (in the environment of the server) TRL makes the model of our own rows
comparing  (in the environment of the server) rows of ids against the wire and the model itself
"""
