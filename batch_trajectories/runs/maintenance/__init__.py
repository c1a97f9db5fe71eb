"""Maintenance of runs that are not in progress.

upkeep          verify a run, and repair it
problem         a problem that verify finds
verify          check a run directory
verify_batches  check batches.jsonl
verify_exports  check training files
repair          repair a run directory
merge           merge several runs into one
fork            make the dataset and config of a run of branches
hermes/         import runs of hermes-agent

Other rooms import fork, hermes/importer, merge, upkeep.
"""
