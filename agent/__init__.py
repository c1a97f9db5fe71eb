"""One conversation: messages, model clients, the loop, and the trajectory that it leaves."""
