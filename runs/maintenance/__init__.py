"""Work on runs that have ended: verify, repair, merge, fork."""
