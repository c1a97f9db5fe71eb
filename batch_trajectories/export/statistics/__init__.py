"""What a run has produced, counted for people: the command `stats`, health checks, the funnel."""
