"""Code of worker processes.

worker           the process: one event loop, many conversations
task_runner      runs one task, up to its record
calls            the open models, their limiters, and keys that the parent sends
call_limiter     limits the worker's calls to one endpoint, also per minute
budget_share     the worker's share of the budget
batch_api_model  a model whose calls are made by a Batch API
agents/          agents that run as commands
audit/           the steps of `check_tasks`
rechecks/        judging conversations again, for `check`
replay           repeats the tool calls of a branch's parent
rebuild          undoes calls that a crash cut off
workspaces       workspaces and sandboxes of tasks
run_images       images of a run, as a worker uses them
workspace_setup  files and commands of a row
history          removes later commits from a repository
diffs/           what conversations changed in repositories
check            the check of a row
judging          where a check runs, and what it gets there
remote_journal   a journal that the parent writes

Other rooms import agents/agent_program, call_limiter, calls, worker.
"""
