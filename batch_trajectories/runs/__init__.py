"""One run: dataset, config, stored records, parent and workers.

errors           errors that stop a run, with their exit codes; Stopped
tasks            Task, BadRow and task keys
amounts          costs, and the limits of an endpoint
shards           parts of a dataset by prompt id
record           the record of a finished task
run_lock         the lock of a run: one process at a time
run_dir          the run directory and run.json
narrowing        changes that would shorten a training file
executor_choice  opens the executor that the config names
run              one start of a run
process/         settings of a process: environment, log, console
store/           journals, records, failures and their index
dataset/         rows, prompts and the scan
sources/         datasets of other kinds, written as JSONL
config/          options from YAML and flags to checked values
scoring/         rewards from functions
totals/          totals of a run, spending, forecasts
protocol/        messages between parent and workers
worker/          code of worker processes
executors/       start workers on this machine or on Ray
batch_api/       calls by the providers' Batch APIs, in the parent
supervisor/      code of the parent process
recording/       record the calls of other programs
planning/        checks before a start, and its preview
maintenance/     verify, repair, merge, fork, import

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
    "amounts",
    "batch_api.totals",
    "config.endpoint_config",
    "config.endpoints",
    "config.fingerprint",
    "config.loading",
    "config.models",
    "config.option_types",
    "config.run_config",
    "config.toolsets",
    "dataset.row",
    "dataset.row_image",
    "dataset.row_setup",
    "dataset.row_user",
    "dataset.scan",
    "errors",
    "executor_choice",
    "executors.local",
    "maintenance.fork",
    "maintenance.hermes.importer",
    "maintenance.merge",
    "maintenance.upkeep",
    "narrowing",
    "planning.plan",
    "planning.preview",
    "process.console",
    "process.first_process",
    "process.long_work",
    "process.requirements",
    "process.startup",
    "recording.recording",
    "recording.upstream",
    "run",
    "run_dir",
    "run_lock",
    "scoring.functions",
    "sources.columns",
    "sources.harbor",
    "sources.kept_dataset",
    "sources.rows_file",
    "sources.source",
    "store.checks",
    "store.checksum",
    "store.failures",
    "store.files",
    "store.index",
    "store.journal",
    "store.reader",
    "store.record_types",
    "store.records",
    "store.rewards",
    "store.scores",
    "store.settled",
    "supervisor.budget",
    "supervisor.progress",
    "tasks",
    "totals.forecast",
    "totals.run_totals",
    "totals.spending",
)
