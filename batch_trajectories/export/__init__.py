"""From records to training files.

conversation/   a record read into a conversation that every format can render
masking/        turns that lose their loss
segments/       rows as the model saw them
templates/      chat templates of models, and rows as they render them
rows/           what a format of rows is; recipes
formats/        a module for each format of rows
filters/        which conversations become rows
agreement       how far reviewers agree with each other, with checks and judges
by_model    what each model cost and how often it passed
reward_statistics  rewards by name and by prompt, pass@k
key_counts      counts by key
reasons         why something failed, by kind
statistics      counts over records
record_order    records in the order of the dataset
cache_use       what came from prompt caches, and what missed them
health          named checks of what a run produced
run_statistics  the command `stats`
funnel          from rows to training rows: what is lost at each step
training_files  the files that every start writes
scoring/        scores given after the run
dataset/        the datasets of `export --format`
parity/         chat templates: whether they train what inference saw

Other rooms import agreement, by_model, cache_use, funnel, health, key_counts, reasons,
record_order, reward_statistics, run_statistics, statistics, training_files.
"""
