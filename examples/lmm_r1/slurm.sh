#!/bin/bash
# LMM-R1's first stage on several machines under Slurm: rows, the reward server, Ray on all machines, the run on the first.
#   sbatch examples/lmm_r1/slurm.sh                                          # words behind it go to r1 train:
#   sbatch --nodes=4 examples/lmm_r1/slurm.sh trainer.experiment_name=pictures worker.actor.model.model_path=text-model \
#       data.train_files=rows/pictures.jsonl worker.actor.model.freeze_vision_tower=false
# Submitted again, it goes on from the last checkpoint. The repository, the rows, the checkpoints and the environment lie on
# a disk that all machines see. Activate the environment before: Slurm passes the PATH on, where r1, r1-rewards and ray are.
#SBATCH --job-name=lmm_r1
#SBATCH --nodes=2
#SBATCH --exclusive # the ports below are this job's alone
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180 # three minutes before the end: the run keeps its last step
set -euo pipefail

# The rows, once. The machines may have no network: then make them before, where there is one.
[ -f rows/text.jsonl ] ||
    python examples/lmm_r1/make_rows.py agentica-org/DeepScaleR-Preview-Dataset@train rows/text.jsonl

# The reward server, on this machine, the job's first, where the run asks it: no other has to reach it.
r1-rewards serve lmm_r1 --port 5000 --response-after chatml --workers 8 &
server=$!
trap 'kill $server 2> /dev/null || true' EXIT
until curl --silent --fail --noproxy '*' --output /dev/null http://127.0.0.1:5000/health; do
    kill -0 $server # it has ended: its message stands above
    sleep 1
done

# Ray: its head on this machine, and all others join it.
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(openssl rand -hex 32) # who knows it may run code on the cluster
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)  # reads to the end: `head` would break the pipe
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port=6379 --num-cpus="$SLURM_CPUS_PER_TASK" --block &
export RAY_ADDRESS=$address:6379
until ray status > /dev/null 2>&1; do sleep 2; done
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
        ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_PER_TASK" --block &
fi

# The run, which waits for the machines. In the background, so that the TERM of above reaches it.
r1 train examples/lmm_r1/config.yaml trainer.nnodes="$SLURM_NNODES" trainer.n_gpus_per_node=8 "$@" &
run=$!
trap 'kill -TERM $run' TERM
while kill -0 $run 2> /dev/null; do wait $run || code=$?; done
exit "${code:-0}"
