"""What tests share: starting the program, reading what it wrote, servers and small datasets."""
