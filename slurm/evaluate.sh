#!/usr/bin/env bash
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#
# Perplexity and bits per byte of the exported model and its base; prints the table and writes summary.json.
#
#   sbatch slurm/evaluate.sh configs/demo.yaml          or bash instead of sbatch; or CONFIG=configs/demo.yaml before it
set -euo pipefail

# sbatch runs a copy of this file from its spool folder: the project is the folder sbatch was called in, not that of $0.
cd "${PROJECT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}"
[[ -f slurm/cpt_korean.sh ]] || { echo "error: call sbatch in the project's root, or set PROJECT" >&2; exit 2; }
export PROJECT=$PWD STAGES=evaluate
exec bash slurm/cpt_korean.sh "$@"
