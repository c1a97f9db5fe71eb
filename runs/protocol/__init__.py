"""What the parent and its workers say to each other."""
