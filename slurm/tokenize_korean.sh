#!/usr/bin/env bash
#SBATCH --job-name=tokenize-korean
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
#
# Tokenizes every corpus that a run's configuration names, over a job array, over MPI ranks, or on
# one machine.
#
#   sbatch slurm/tokenize_korean.sh configs/….yaml                  8 array tasks; so does CONFIG=…
#   sbatch --array=0-63 --cpus-per-task=32 slurm/tokenize_korean.sh    64 nodes
#   MPI=1 sbatch --array=0 --nodes=4 --ntasks=128 slurm/tokenize_korean.sh    128 MPI ranks
#   bash slurm/tokenize_korean.sh                                   the cores of this machine
#   … slurm/tokenize_korean.sh --max-bad-fraction 0.05              flags of scale-cpt tokenize
#
# After a kill or a lost node submit it again, with another array or none: finished units are kept,
# and the result is the same, byte for byte. The array tasks need not run at the same time: each
# processes what is not done.
set -euo pipefail

caller_folder=$PWD # relative paths of the command line begin there
project=$(dirname "$0")/..
# sbatch runs a copy of this file from its spool folder: the project is the folder it was called in.
[[ -f "$project/slurm/common.sh" ]] || project=${SLURM_SUBMIT_DIR:-$project}
cd "${PROJECT:-$project}"
if [[ ! -f slurm/common.sh ]]; then
    echo "error: call sbatch in the project's root, or set PROJECT (found $PWD)" >&2
    exit 2
fi
source slurm/common.sh
load_site
choose_config "$@"

command=(python -m pipeline tokenize "$CONFIG" "${changes[@]}" "${arguments[@]}")
if [[ -n "${MPI:-}" ]]; then
    command=(over_mpi "${command[@]}" --mpi)
elif [[ -n "${SLURM_ARRAY_TASK_ID:-}" ]]; then
    first=${SLURM_ARRAY_TASK_MIN:-0}
    # In an array such as 2,5 the remainder keeps the number below the count; two tasks may then
    # begin at the same place.
    number=$(((SLURM_ARRAY_TASK_ID - first) / ${SLURM_ARRAY_TASK_STEP:-1} % SLURM_ARRAY_TASK_COUNT))
    command=(here "${command[@]}" --workers "${WORKERS:-${SLURM_CPUS_PER_TASK:-1}}"
        --share "$number/$SLURM_ARRAY_TASK_COUNT")
else
    on_slurm || say "no Slurm here: tokenizing on this machine"
    command=(here "${command[@]}" --workers "${WORKERS:-${SLURM_CPUS_PER_TASK:-$(nproc)}}")
fi

announce "corpora of $CONFIG"
run_stage tokenize "${command[@]}"
say "done"
