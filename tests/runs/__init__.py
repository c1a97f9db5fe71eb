"""Tests of runs/: config, dataset, workers, limits, files, resuming and repairing.

test_requirements     what the program says where it cannot start
test_config_file      mistakes in config files and flags
test_option_names     options that are gone, and names that other programs give to ours
test_origin           runs that were not started here
test_import           conversations of other programs as records
test_import_rows      the forms that rows of messages have in published files
test_import_round_trips  exported rows come back equal
test_tables           records as tables of Arrow, pandas and datasets
test_agents           agents in a config: presets, versions, and options that are refused
test_dataset          reading prompts
test_sources          datasets in other forms than plain JSONL
test_row_setup        rows that bring files, and checks of the final state
test_history          what is left of a repository's history before a conversation
test_row_texts        long texts that row and conversation share, stored once
test_spliced          lines of records, written with other members
test_row_images       columns that name an image, and how to work and judge in it
test_rows_files       rows files: other datasets become rows of a run
test_harbor           Harbor task directories as rows
test_rewards          reward functions and their scores
test_row_checks       checks by reward files and by the tests that ran
test_cached_scan      the cached scan of a dataset
test_logprobs         what a start says of log-probabilities
test_long_work        progress of long work
test_stopping         samples until enough have passed, and the cascade of models
test_endpoints        several models and endpoints in one run
test_endpoint_access  headers, parameters, proxies and key commands of endpoints
test_labels           labels of people, and what reads them
test_steering         steering a run that works
test_limiter          the limit on concurrent model calls
test_budget           the budget of a run
test_bills            the budget against endpoints that bill as providers do
test_spending         the sum spent by a run
test_prices           prices of the user's own
test_progress         the progress line
test_suspects         tasks that may have killed their workers
test_batch_service    waves of the Batch API, with a crash at each step
test_remote_journal   the journal of a worker on another machine
test_storage          records, index, turn journal, lock
test_index            the index of the records
test_checks           verdicts of checks in records and filters
test_verify           `verify`: damage found and repaired
test_hand_edits       records that were edited by hand
test_fork             `fork`: new branches from finished conversations
test_merge            `merge`: several runs become one
test_shards           `--shard`
test_import_hermes    `import_hermes`
"""
