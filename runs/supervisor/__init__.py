"""What runs in the parent process.

supervisor   assigns tasks, writes what is finished
worker_pool  starting, watching and replacing workers
task_queue   the order of tasks, and who is suspected
budget       grants shares of the run's budget
limiter      the rule that finds how many calls an endpoint takes
limits       shares of that for the workers
progress     the progress line and progress.json
damaged      damaged journal lines: set aside, named, counted
key_service  runs key commands, sends keys to workers
outages      endpoints that do not answer, for the user to see
"""
