"""Audits: is each task of a dataset sound? `check_tasks` makes them, `--only_sound` reads them.

An audit is a run without a model: each row has the samples of `steps`, which workers carry out
(`runs.worker.audit`) and record like conversations. `tasks.jsonl` is derived from the records.

audited     the config of an audit
steps       what is done with each row, by the number of its sample
reference   where the solution of a row is
skipped     whether a check passed without a test that ran
only_sound  the rows of a run that an audit found sound
verdicts    records of steps -> one verdict per row, tasks.jsonl

Other rooms import audited, only_sound, reference, steps, verdicts.
"""
