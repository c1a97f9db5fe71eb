"""Code of the parent process.

run          one start of a run
supervisor   assigns tasks and writes finished records
worker_pool  the parts of one start; starts, watches and shuts down workers
task_queue   the order of tasks, and suspects
budget       grants shares of the run's budget to workers; sets damaged lines aside
limits       finds how many calls in flight an endpoint supports; divides limits
progress     the progress line and progress.json
steering     does what people ask of a run while it works
key_service  runs key commands and sends their keys to workers
refusals     endpoints that do not answer, and those that refuse everything
parser_watch  endpoints that leave tool calls and thoughts in texts

Other rooms import budget, limits, progress, run.
"""
