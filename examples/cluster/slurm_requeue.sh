#!/bin/bash
# One machine under Slurm, where jobs are preempted or their time is short: the job goes back into the queue and resumes.
#   sbatch examples/cluster/slurm_requeue.sh
#SBATCH --job-name=r1
#SBATCH --nodes=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue # also after a preemption, which Slurm announces by SIGTERM
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60 # to this script, a minute before the end
set -uo pipefail

r1 train examples/quickstart/config.yaml trainer.n_gpus_per_node=2 &
run=$!
trap 'kill -USR1 $run' USR1
trap 'kill -TERM $run' TERM
wait $run
code=$?
while kill -0 $run 2> /dev/null; do wait $run; code=$?; done # a signal ends a wait
[ "$code" = 138 ] && scontrol requeue "$SLURM_JOB_ID" # 128 + SIGUSR1: its time was over, and it has saved
exit "$code"
