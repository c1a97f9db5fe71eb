"""What is done to runs that nobody works on.

upkeep          check a run, repair it
problem         one thing that is wrong
verify          what is wrong in a run directory
verify_batches  the same for batches.jsonl
verify_exports  the same for training files
repair          mends what can be mended
merge           one run of several
fork            branches of conversations, as a run
hermes/         runs of hermes-agent
"""
