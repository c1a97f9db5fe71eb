"""The formats of training rows.

registry      the formats by name
hermes        ShareGPT in the Hermes dialect
openai_chat   OpenAI messages
llamafactory  LLaMA-Factory
atif          ATIF of harbor
preference    DPO and KTO
rl            token ids for reinforcement learning
prompts       prompts for trainers that make their own rollouts
predictions   diffs for the harness of SWE-bench
row_files     files of rows: staged, hashed, split and sharded
columns       the columns of each format
arrow         copies as Parquet and as directories of `datasets`

Other rooms import arrow, columns, hermes, llamafactory, predictions, preference, prompts,
registry, rl, row_files.
"""
