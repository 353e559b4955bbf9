#!/bin/bash
# Train on two laptops in one network. Start it on both within five minutes:
#
#   laptops.sh 0 192.168.1.10 wlan0     # on the first laptop, which has the address 192.168.1.10 and the run's folder
#   laptops.sh 1 192.168.1.10 en0       # on the second one
#
# The last argument is the network interface of the laptop that it runs on. Start both again to continue a run.
set -euo pipefail

node=${1:?0 on the first laptop, 1 on the second}
first=${2:?address of the first laptop}
export GLOO_SOCKET_IFNAME=${3:?network interface, such as wlan0}
export OMP_NUM_THREADS=1

out=runs/laptops
work=(train --task digits_varied --hosts 32 --rounds 20 --out "$out")
if [[ -e "$out/config.json" ]]; then work=(train --resume "$out"); fi

# With a fixed number per laptop, rank 0 and the run's folder stay on the first one.
torchrun --nnodes 2 --node-rank "$node" --master-addr "$first" --master-port 29400 \
  --nproc-per-node 2 --max-restarts 3 -m esper "${work[@]}"
