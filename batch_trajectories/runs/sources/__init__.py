"""From what a user names as the dataset to the JSONL file that a run reads.

source        what a name means: files, a saved directory, a dataset of the Hugging Face hub
file_rows     rows of JSON, CSV and compressed files; elements of a JSON array
arrow_rows    rows of Parquet files and of what the `datasets` library reads
harbor        Harbor task directories
harbor_settings  the settings of their task.toml
hub           datasets of the hub, and directories written by `save_to_disk`
columns       which columns of a source become which columns of a row
rows_file     rows files: how rows of a known kind of dataset become rows of a run
templates     the templates in rows files
kept_dataset  the source as JSONL, written once into the run directory

Other rooms import columns, harbor, hub, kept_dataset, rows_file, source.
"""
