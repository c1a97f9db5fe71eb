"""One run: dataset, config, stored records, parent and workers.

store/        journals, records, failures and their index
mirror/       a copy of a run in a bucket
dataset/      rows, prompts and the scan
sources/      datasets of other kinds, written as JSONL
config/       options from YAML and flags to checked values
scoring/      rewards from functions
stopping/     which samples are needed: until enough have passed, with which model
audit/        is each task sound? the steps and verdicts of `check_tasks`
sharing/      limits that several runs share
directory/    the run directory: lock, run.json, totals
protocol/     what goes between parent and workers
worker/       code of worker processes
executors/    start workers on this machine or on Ray
batch_api/    calls by the providers' Batch APIs, in the parent
planning/     checks before a start, and its preview
supervisor/   code of the parent process
recording/    record the calls of other programs
maintenance/  verify, repair, merge, fork, import of hermes-agent's runs
importing/    conversations of other programs
"""
