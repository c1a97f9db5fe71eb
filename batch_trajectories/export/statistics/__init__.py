"""Statistics of the results of a run for people: the command `stats`, health checks, the funnel."""
