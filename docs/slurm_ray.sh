#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --signal=B:TERM@120
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --port=6379 --block &
sleep 15
srun --nodes=3 --ntasks=3 --exclude="$head" ray start --address="$head:6379" --block &
sleep 15
python batch_runner.py --config=run.yaml --run_name=big --executor=ray \
    --ray_address="$head:6379" --num_workers=64 & driver=$!
trap 'kill -TERM $driver' TERM
wait $driver; wait $driver
