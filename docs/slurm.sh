#!/bin/bash
#SBATCH --array=0-7 --cpus-per-task=4 --mem=8G --time=12:00:00
#SBATCH --signal=B:TERM@120 --requeue --open-mode=append
# Submit it from the directory of run.yaml, in a shell whose environment has `batch-runner`.
# To resubmit only some indices (--array=3,5), write out n: SLURM_ARRAY_TASK_COUNT counts those submitted.
# Merge when all are done (`--wrap` runs sh, which has no big.{0..7}):
#     sbatch --dependency=afterok:$JOB --wrap='batch-runner merge trajectories/big.[0-7] --into=big'
# The directory of runs must keep locks. If this one is on NFS or Lustre, add a disk of the node and a place
# that all nodes see, from which a job on another node goes on:
#     --output_dir="$TMPDIR/runs" --mirror="file://$PWD/mirrors/big.$SLURM_ARRAY_TASK_ID"
batch-runner --config=run.yaml --grace_s=60 --num_workers="$SLURM_CPUS_PER_TASK" \
    --shard="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
    --run_name="big.$SLURM_ARRAY_TASK_ID" & runner=$!
trap 'kill -TERM $runner' TERM
wait $runner; wait $runner; code=$?
# Interrupted (143) before the end of the job's time: resume in a new job.
[ $code -eq 143 ] && scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
exit $code
