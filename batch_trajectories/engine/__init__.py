"""The directory of a run: its lock, its config, and the totals of what is in it.

run_lock    the lock of a run: one process at a time
run_dir     the run directory and run.json
origin      whether this user started a run here; what is not used of others
leftovers   what is in the place of a run: other files, leftovers of a crash, an earlier run
control     how people steer the process that works on a run
narrowing   changes that would shorten a training file
run_totals  tasks done, failed, discarded and pending; tokens, cost; all that was spent
owed        tasks without a record, and samples that are no tasks; the rule that says which
forecast    time and cost of the whole run, from a sample

Other rooms import all modules.
"""
