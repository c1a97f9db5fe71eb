"""The options of a run.

option_types      types of options
run_config        RunConfig: each option with type, default and help
sample_options    SampleOptions: those about samples and their models
sandbox_options   SandboxOptions: those about where commands run
sandboxes         the sandboxes that they ask for, on this machine
loading           a RunConfig from YAML and flags
endpoint_config   an entry of `endpoints`
endpoints         types of options about endpoints; secrets in the clear
amounts           costs, and the limits of an endpoint
models            models, endpoints, limits and budget of a config; which model a task draws
agents            agents that run as commands: presets, and the options that go with them
toolsets          the toolsets of a config
fingerprint       the options that affect the data, and their digest

Other rooms import agents, amounts, endpoint_config, endpoints, fingerprint, loading, models,
option_types, run_config, sandboxes, toolsets.
"""
