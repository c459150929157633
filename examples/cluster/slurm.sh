#!/bin/bash
# Two machines under Slurm: Ray on both, the run on the first.
#   sbatch examples/cluster/slurm.sh
# The repository, the data, the checkpoints and the environment must lie on a disk that both see. Activate the
# environment before: Slurm passes the PATH on, where r1 and ray have to be.
#SBATCH --job-name=r1
#SBATCH --nodes=2
#SBATCH --exclusive # the port below is this job's alone
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@180 # three minutes before the end: the run keeps its last step, and the same job goes on from it
set -euo pipefail

export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(openssl rand -hex 32) # who knows it may run code on the cluster

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)  # reads to the end: `head` would break the pipe
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
export RAY_ADDRESS=$address:6379
until ray status > /dev/null 2>&1; do sleep 2; done
srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
    ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --block &

r1 train examples/quickstart/config.yaml \
    trainer.nnodes=2 \
    trainer.n_gpus_per_node=2 &
run=$!
trap 'kill -TERM $run' TERM
while kill -0 $run 2> /dev/null; do wait $run || code=$?; done
exit "${code:-0}"
