"""What all checks by real trainers use, in the environments of these."""
