#!/bin/bash
# Train on four nodes of eight GPUs: sbatch slurm.sh [RUN-FOLDER]
# Submit it again to continue. The folder must be on a file system that all nodes see.
#SBATCH --job-name=esper
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail

out=${1:-runs/cluster}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}
export OMP_NUM_THREADS=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or no node can join a running job (torch 2.13)
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ib0}  # the network between the nodes; `ip -brief address` lists them

work=(train --task cifar_baseline --device cuda --hosts 1024 --rounds 50 --out "$out")
if [[ -e "$out/config.json" ]]; then work=(train --resume "$out"); fi

# One torchrun per node, which starts one rank per GPU.
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$first:29400" --rdzv-id "$SLURM_JOB_ID" \
  -m esper "${work[@]}"
