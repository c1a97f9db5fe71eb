"""Tests of `check_tasks` and what uses its verdicts.

planting      rows with a known defect, and sound ones
test_plain    rows without images: verdicts, resuming
test_kinds    rows in images: SWE kinds and Harbor tasks
test_planted  280 rows of all kinds, 80 of them with a planted defect
test_damaged_images  images that were cut short
test_cheats  agents that look for the solution
test_only_sound  runs of the rows that an audit found sound
test_skipped  checks that pass although no test ran
test_reference  where the solution of a row is
"""
