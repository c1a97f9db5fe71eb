"""What all checks by real trainers use, in the environments of these.

environment  virtual environments, and modules that run in one
labels       which tokens of a row must carry loss, and which must not
rows         the rows of an export, read as anyone would
sample_run   a run of which no text is like another
tiny         a tokenizer of the texts at hand, and a random model
"""
