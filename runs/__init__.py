"""One run: its config, dataset, stored records, worker processes and summary."""
