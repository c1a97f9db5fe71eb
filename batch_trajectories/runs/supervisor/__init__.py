"""Code of the parent process.

run          one start of a run
supervisor   assigns tasks and writes finished records
worker_pool  starts, watches and shuts down workers
task_queue   the order of tasks, and suspects
budget       grants shares of the run's budget to workers
limiter      finds how many calls in flight an endpoint supports
limits       divides that among the workers
progress     the progress line and progress.json
damaged      sets damaged lines aside
key_service  runs key commands and sends their keys to workers
outages      reports endpoints that do not answer
refusals     holds failures back while an endpoint refuses everything

Other rooms import budget, damaged, limits, progress, run.
"""
