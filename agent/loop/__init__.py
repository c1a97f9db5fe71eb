"""The loop: decide the next step, take it, until the conversation ends."""
