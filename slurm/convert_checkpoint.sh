#!/usr/bin/env bash
#SBATCH --job-name=convert
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#
# Converts a run's newest checkpoint into a Hugging Face folder and compares that with the trained model.
#
#   sbatch slurm/convert_checkpoint.sh configs/demo.yaml          or bash instead of sbatch; or CONFIG=configs/demo.yaml before it
set -euo pipefail

# sbatch runs a copy of this file from its spool folder: the project is the folder sbatch was called in, not that of $0.
cd "${PROJECT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}"
[[ -f slurm/cpt_korean.sh ]] || { echo "error: call sbatch in the project's root, or set PROJECT" >&2; exit 2; }
export PROJECT=$PWD STAGES=convert
exec bash slurm/cpt_korean.sh "$@"
