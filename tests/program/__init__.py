"""Tests of the whole program: real processes, endpoints on loopback, signals.

test_api            runs from Python
test_agent_runs     agents that run as commands: recorded, killed, resumed, limited
test_agent_users    agents that get several messages, or repeat one call
test_record         the calls of programs that run elsewhere
test_conversation_ids  the ids of conversations as an endpoint sees them, over kills
test_run            runs from start to end, killed and resumed
test_user_turns     conversations with several messages of the user: kills, checks
test_plain_run      what a run loads that uses no feature
test_wheel          the wheel: its names, presets, types, and the demo outside of a checkout
test_run_options    options of conversations in whole runs
test_token_runs     runs that record token ids, killed and resumed
test_token_agents   token ids of agents and recorded sessions
test_web_run        runs with the toolset web
test_batches        runs by the provider's Batch API
test_credentials    credentials that change while runs work, are killed and resumed
test_caches_seen    runs against prompt caches: hits, misses
test_ray            runs whose workers are Ray actors
test_outages        endpoints that cannot be reached
test_parser_watch   servers that leave calls or thoughts in texts
test_refused_requests endpoints that refuse every request
test_processes      no process is left behind
test_exact_json     integers of any size, from the model to the training row
test_stopping_runs  runs with --until_passed and cascades, killed
test_seeds_batch    behaviours of the seed documents, in whole runs
"""
