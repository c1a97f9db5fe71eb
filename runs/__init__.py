"""One run: dataset, config, stored records, parent and workers.

errors           what stops a run, with its exit code; Stopped
tasks            Task, BadRow and their keys
amounts          costs and limits
shards           parts of a dataset by prompt id
record           the record of a finished task
run_lock         one process at a time works on a run
run_dir          the run directory, its lock and run.json
narrowing        options that would shorten a training file
executor_choice  opens the executor that was chosen
run              one start of a run
process/         what a process does to itself before it works
store/           journals, records, failures and their index
dataset/         rows, prompts and the scan
sources/         datasets of other kinds, written as JSONL
config/          options from YAML and flags to checked values
totals/          the sums of a run, what it spent, forecasts
protocol/        what parent and workers say to each other
worker/          runs in a worker process
executors/       where workers run
batch_api/       calls by the providers' Batch APIs, in the parent
supervisor/      runs in the parent process
planning/        what a start would do, checked before any call
maintenance/     verify, repair, merge, fork, import

Other rooms import only the modules in `SEAM`.
"""

SEAM = (
    "batch_api.totals",
    "config.endpoints",
    "config.loading",
    "config.models",
    "config.option_types",
    "config.run_config",
    "config.toolsets",
    "dataset.row",
    "dataset.row_setup",
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
    "process.requirements",
    "process.startup",
    "run",
    "run_dir",
    "run_lock",
    "sources.columns",
    "sources.kept_dataset",
    "sources.source",
    "store.checks",
    "store.checksum",
    "store.failures",
    "store.files",
    "store.index",
    "store.journal",
    "store.reader",
    "store.records",
    "store.settled",
    "supervisor.progress",
    "tasks",
    "totals.forecast",
    "totals.run_totals",
    "totals.spending",
)
