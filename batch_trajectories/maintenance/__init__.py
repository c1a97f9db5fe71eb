"""Maintenance of runs that are not in progress.

upkeep          verify a run, and repair it
verify          check a run directory
verify_batches  check batches.jsonl
verify_exports  a problem that verify finds; check training files
merge           merge several runs into one
fork            make the dataset and config of a run of branches
import_hermes   import runs of hermes-agent

Other rooms import fork, import_hermes, merge, upkeep.
"""
