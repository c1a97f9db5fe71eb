"""Tests by room and level; each folder names its files.

toolsets/ agent/ runs/ export/ report/ view/ agents/ cli/   tests of the room of that name
stored_runs/        runs of earlier commits go on
images/             working in container images
mirror/             runs with a copy in a bucket
sharing/            runs that share a budget and rates
rechecks/           `check` and what uses its verdicts
audit/              `check_tasks` and what uses its verdicts
program/            the whole program: real processes, endpoints on loopback, signals
faults/             the fault matrix of tests/faults/README.md
test_architecture   the structure of the code
test_docs           the README and the pages are true
test_doc_blocks     every block of the pages is run or read
test_seeds          every behaviour of the seed documents has a test
test_fake_endpoint  the endpoint that other tests rely on
test_prefork        forked commands do what new processes do

running answering websites playing exporting stored   shared helpers
prefork             starts batch_runner.py without the time of its imports
real_agents         kills and resumes runs of installed agents: python -m tests.real.agents
agent_images        the image in which these run
real_sessions       sessions of installed agents, imported: python -m tests.real.sessions
wire_forms          what requests, replies and rows say, in one form
wire_rows           rows of every format compared with an endpoint's log
real_servers/       a real vLLM and a real TRL: python -m tests.real.servers --venv DIR
option_docs         writes docs/options.md
raw_mcp_server      an MCP server without the SDK
"""
