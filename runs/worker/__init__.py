"""What runs in a worker process.

worker           the process: one event loop, many conversations
task_runner      one task, from replay to record
durable_calls    nothing is used before it is on disk
calls            the open models and their limiters
parent_keys      keys that the parent sends
call_limiter     the worker's share of the calls in flight
token_bucket     rates per minute
budget_share     the worker's share of the budget
batch_api_model  a model whose calls go by a provider's batch
replay           replaying a stored conversation
workspaces       workspace and sandbox of a task
workspace_setup  files, commands and check of a row
remote_journal   a journal that the parent keeps
"""
