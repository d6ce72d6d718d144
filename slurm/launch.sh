#!/usr/bin/env bash
# One rank: srun starts this once a task. It gives Slurm's numbers the names that torch knows and becomes the command.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
read -ra container <<<"${CONTAINER:-}"
exec "${container[@]}" "$@"
