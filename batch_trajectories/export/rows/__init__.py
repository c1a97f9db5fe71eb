"""What a format of rows is, and what formats share.

format_names  the names of the formats
format        what a format is
recipe        formats, style, filters and splits of an export
recipe_paths   paths in its file, which are relative to it
filter_options  the filters of a recipe
row_files     files of rows: staged, hashed, split and sharded
files         the files of a format: one row per conversation, per turn, or of its own
late_keys     whether `datasets` refuses the JSON lines
per_turn      a conversation cut into one for each turn
messages      conversations as OpenAI messages
samples       the samples of a prompt, compared
tables        rows as Arrow tables

Other rooms import files, filter_options, format, format_names, messages, recipe, row_files,
samples, tables.
"""
