"""Runs from Python: start them and read them. The commands use this, too.

ai_agent    `AIAgent`
start       start a run; how it ended
audit       audits of tasks, for `check_tasks`
recheck     judge finished conversations again, for `check`
record      record the calls of other programs
stored_run  read a run on disk, during the run or afterwards; conversations in flight
tables      records as Arrow tables
results     write the training files and the summary of a run

Other rooms import ai_agent, audit, recheck, record, results, start, stored_run.
"""
