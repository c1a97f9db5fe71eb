"""The datasets of `export --format`.

directory     the directory, its manifest and its twin for LLaMA-Factory
build         from records to rows
format_files  the files of one format
splits        which split a prompt belongs to
card          the dataset card
checking      comparing a dataset with its records
rendering     rows through a chat template
pushing       to the Hugging Face hub
"""
