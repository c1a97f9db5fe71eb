"""What all checks by real trainers use, in the environments of these.

environment  virtual environments, and modules that run in one
rows         the rows of an export, read as anyone would
tiny         a tokenizer of the texts at hand, a random model, and what each text's labels must be
"""
