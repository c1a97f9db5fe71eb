"""Audits: is each task of a dataset sound? `check_tasks` makes them, `--only_sound` reads them.

An audit is a run without a model. Each row has the samples of `steps`, which workers carry out and
record like conversations. `tasks.jsonl` is derived from the records.
"""
