"""`agents check`: an agent is tried out before anything is paid."""
