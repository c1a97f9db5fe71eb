"""A real inference server and a real trainer against our rows: `python -m tests.real.servers`."""
