#!/usr/bin/env bash
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#
# Perplexity and bits per byte of the exported model beside its base; prints the table and writes summary.json.
#
#   CONFIG=configs/demo.yaml sbatch slurm/evaluate.sh          or bash instead of sbatch
set -euo pipefail

# sbatch runs a copy of this file from its spool folder: the project is where sbatch was called, not where $0 lies.
cd "${PROJECT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}"
source slurm/common.sh || { echo "error: call sbatch in the project's root, or set PROJECT" >&2; exit 2; }
load_site

choose_config
run_stage evaluate here python tools/evaluate.py --config "$CONFIG"
