"""The agent loop: decide the next step, carry it out, until an ending."""
