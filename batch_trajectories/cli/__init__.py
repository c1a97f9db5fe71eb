"""The commands of batch_runner.py: from options to an exit code.

command_line    the commands by name; click classes: options from RunConfig, help, completion
option_groups   the options of --help, the groups of --help_all
exit_codes      error messages and exit codes
shared          options and functions that commands share
run             run, estimate, check_tasks, import_hermes
record          record
inspect_runs    status, export, verify, merge, label, pause, resume, limits, stop, retry
look            report, show, compare, stats
look_at_source  look
score           score
build_images    build_images
fork            fork
lists           agents, tools, distributions, endpoints, errors
listings        the lists that `tools` and `endpoints` print
export_options  options of `export`

Other rooms import command_line, exit_codes.
"""
