#!/usr/bin/env bash
# Runs a recipe on nodes of a Slurm cluster. From the repository's root, which all nodes share:
#
#   sbatch --job-name try-2 recipes/launch/slurm.sh recipes/dapo_glm5p3_lora.py --model /models/GLM-5.3-BF16
#
# The job's name is the run's: runs/try-2. The job's exit code is the recipe's. 120 s before the time limit, on scancel and on
# preemption the recipe gets SIGTERM and ends with the checkpoint of its last step. A job that Slurm requeues by itself (a node
# failed, it was preempted) goes on from there; after the time limit or scancel submit it again, with --resume.
#SBATCH --job-name=dapo-glm5p3-lora
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=4-00:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
set -u
if [ ! -f recipes/launch/node.sh ]; then                       # Slurm runs a copy of this file: its own path says nothing
    echo "$PWD has no recipes/launch/node.sh: submit from the repository's root" >&2
    exit 1
fi
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ')
export HOSTS NAME=$SLURM_JOB_NAME JOB=slurm-$SLURM_JOB_ID PORT=$((20000 + SLURM_JOB_ID % 10000))
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-0}}
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN                      # other users of the network must not reach this job's Ray

# --cpu-bind=none: a task would otherwise be bound to one core, and all of Ray with it
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none bash recipes/launch/node.sh "$@" &
trap 'trap "" TERM; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM       # to every node.sh; srun would kill them without a word
wait $!
code=$?
if [ $code -gt 128 ]; then                                     # the signal ended `wait`, not srun
    wait $!
    again=$?
    [ $again = 127 ] || code=$again
fi
exit $code
