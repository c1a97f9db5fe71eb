"""What a process does to itself before it works."""
