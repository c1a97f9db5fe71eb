"""Tests of export/: rows in every format, filters, datasets.

test_export               the files of a run, from its records
test_reading              any record is read or refused by name
test_hermes               the Hermes format
test_leaked_calls         tool calls that a server left in a text
test_leaks                calls that look for the solution of a task
test_health               named checks of what a run produced
test_cache_use            prompt caches, and what missed them
test_export_formats       one record in every format
test_formats              a module is a format: names, help, columns, cards
test_export_loss          who wrote each message, and which turns carry loss
test_export_masks         turns without loss by a recipe; failures as rows
test_export_per_turn      one row per turn
test_fit                  rows fitted to a chat template and a length
test_parity               chat templates, judged by what they train
test_segments             rows of segments, compared with requests
test_export_agents        conversations of agents that run as commands
test_export_patches       diffs of conversations in images
test_export_parts         pictures and documents in messages of agents
test_export_forged        text that looks like structure
test_export_tolerance     which rows are refused
test_export_views         what the model did not see of its conversation
test_hidden_reasoning     reasoning that the API hides
test_export_statistics    `stats`
test_export_funnel        from rows to training rows
test_export_rendering     rows through chat templates
test_export_dataset       datasets by recipe
test_mix                  caps, bands, order and splits; datasets of several runs
test_export_evaluation    benchmarks that conversations must not contain
test_export_hf            directories of `datasets`
test_export_rewards       rewards by name in rows, filters and pairs
test_reward_statistics    rewards in `stats`
test_scoring              the command `score`
test_parts                records read by several processes
test_export_push          a dataset sent to a hub
test_export_determinism   same conversations, same bytes
test_export_prompts       prompts for rollouts of trainers
test_export_rl            token ids for reinforcement learning, and what trainers read of them
test_trainer_labels       what checks by real trainers say of labels
test_export_docs          docs/export.md
"""
