"""Looking at runs: the report page, one conversation in the terminal, two runs side by side."""
