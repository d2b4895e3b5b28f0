#!/bin/bash
# A training job on Slurm with the loop beside it: one Ray node and one training task a node.
#     sbatch deploy/slurm.sh EXPERIMENT.yaml train.py
#SBATCH --job-name=dynamiccl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

experiment=$(realpath "$1")
script=$2
port=6379
out=$PWD/runs/$SLURM_JOB_ID # on storage that all nodes share

# What is submitted has to know the token; so does every node.
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# Ranks may wait for Ray's workers, which are nice otherwise.
export RAY_worker_niceness=0

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_ADDRESS=$head:$port

# --overlap lets the training share the nodes with Ray, which takes no GPU.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    env -u RAY_ADDRESS ray start --head --port=$port --num-gpus=0 --resources='{"dynamiccl": 1}' --block &
until srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray status > /dev/null 2>&1; do sleep 2; done
if ((SLURM_NNODES > 1)); then
    srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$head" \
        env -u RAY_ADDRESS ray start --address="$head:$port" --num-gpus=0 --resources='{"dynamiccl": 1}' --block &
fi

# The job id of the experiment is the one that the training exports.
eval "$(dynamiccl plugin env --job "slurm-$SLURM_JOB_ID")"
srun --overlap --ntasks-per-node=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=gpu \
    --rdzv-backend=c10d --rdzv-endpoint="$head:29500" "$script" &
training=$!

# It looks for ranks for 30 s; they are there once NCCL has made its first communicator.
until srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    dynamiccl online "$experiment" --set "job=slurm-$SLURM_JOB_ID" --out "$out"; do
    kill -0 "$training" 2> /dev/null || break
done &
wait "$training"
