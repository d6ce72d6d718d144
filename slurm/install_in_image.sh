#!/usr/bin/env bash
# Installs scale-cpt into a container image, as root on Debian. Dockerfile and slurm/scale-cpt.def
# run it.
#
#   bash slurm/install_in_image.sh cuda|cpu
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
    cuda) torch_index=() ;; # PyPI's torch is for NVIDIA GPUs
    cpu) torch_index=(--index-url https://download.pytorch.org/whl/cpu) ;;
    *)
        echo "error: VARIANT: expected cuda or cpu, found \"${1:-}\"" >&2
        exit 2
        ;;
esac

# A compiler for torch.compile and DeepSpeed's own code, MPI for tokenization with --mpi.
apt-get update
export DEBIAN_FRONTEND=noninteractive
apt-get install --yes --no-install-recommends build-essential openmpi-bin
rm -rf /var/lib/apt/lists/*

pip install --no-cache-dir --constraint constraints.txt "${torch_index[@]}" torch
pip install --no-cache-dir --constraint constraints.txt '.[eval]'
scale-cpt --version
