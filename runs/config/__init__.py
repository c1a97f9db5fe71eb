"""The options of a run.

option_types      types of options
run_config        RunConfig: every option once
loading           from YAML and flags
endpoints         entries of `endpoints`
plain_secrets     secrets that a config states in the clear
models            models, endpoints and limits of a config
sampling          which model and toolsets a task draws
toolsets          the toolsets of a config
fingerprint       what may not change from start to start
"""
