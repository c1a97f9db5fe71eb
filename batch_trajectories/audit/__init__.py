"""Audits of the tasks of a dataset: `check_tasks` makes them, `--only_sound` reads them.

An audit finds out whether each task is sound. It is a run without a model. Each row has a sample
for each step (see `audit_step`), which workers carry out and record like conversations.
`tasks.jsonl` is derived from the records.
"""
