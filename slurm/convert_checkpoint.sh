#!/usr/bin/env bash
#SBATCH --job-name=convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#
# A run's newest checkpoint to a Hugging Face folder, compared with the trained model before it is called done.
#
#   CONFIG=configs/demo.yaml sbatch slurm/convert_checkpoint.sh          or bash instead of sbatch
set -euo pipefail

# sbatch runs a copy of this file from its spool folder: the project is where sbatch was called, not where $0 lies.
cd "${PROJECT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}"
source slurm/common.sh || { echo "error: call sbatch in the project's root, or set PROJECT" >&2; exit 2; }
load_site

choose_config
run_stage convert here python tools/convert_checkpoint.py --config "$CONFIG"
