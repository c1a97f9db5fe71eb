#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --cpus-per-task=16 --mem=64G --time=12:00:00
#SBATCH --signal=B:TERM@120
# Submit it from the directory of run.yaml, in a shell whose environment has `batch-runner` and `ray`.
# The cluster has a token of its own, which only this job knows.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK    # srun does not take it from sbatch
node="--num-cpus=$SLURM_CPUS_PER_TASK --block"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --port=6379 $node &
sleep 15
srun --nodes=3 --ntasks=3 --exclude="$head" ray start --address="$head:6379" $node &
sleep 15
batch-runner --config=run.yaml --run_name=big --executor=ray \
    --ray_address="$head:6379" --num_workers=64 & driver=$!
trap 'kill -TERM $driver' TERM
wait $driver; wait $driver
