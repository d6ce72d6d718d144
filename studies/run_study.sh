#!/usr/bin/env bash
#SBATCH --job-name=run-study
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#
# A study: runs that differ in method, learning rate and seed (docs/studies.md). On Slurm each run is
# a job, which saves, requeues and resumes like any other. This job submits the runs that can start,
# then itself again after them, with their names as arguments, until none is left. A named run that
# is still not done is an error. Submitted by hand without names, the job continues with what is
# left. It must not be requeued: it would submit the runs twice.
#
#   sbatch studies/run_study.sh studies/configs/korean_llama3.2_1b.yaml      or STUDY=… before it
#   RUN_SBATCH_OPTIONS="--nodes=2 --ntasks-per-node=8 --gpus-per-node=8" STUDY=... \
#       sbatch studies/run_study.sh
#   STUDY=studies/configs/korean_quick.yaml bash studies/run_study.sh        all on this machine
#
# This job and tokenization are one process each: SERIAL_SBATCH_OPTIONS (slurm/site.env) keep them
# off GPU nodes.
set -euo pipefail

caller_folder=$PWD # relative paths of the command line begin there
project=$(dirname "$0")/..
# sbatch runs a copy of this file from its spool folder: the project is the folder it was called in.
[[ -f "$project/slurm/common.sh" ]] || project=${SLURM_SUBMIT_DIR:-$project}
cd "${PROJECT:-$project}"
source slurm/common.sh || { echo "error: call sbatch in the project's root, or set PROJECT" >&2; exit 2; }
load_site

STUDY=$(from_caller "${1:-${STUDY:-studies/configs/korean.yaml}}")
[[ -f "$STUDY" ]] ||
    die "STUDY=$STUDY: no such file; the studies that come with the project are in studies/configs/"
export STUDY
study=(python -m studies run "$STUDY" ${DATA:+--data "$DATA"})
on_slurm || here "${study[@]}"

say "study $STUDY in $PWD, job $SLURM_JOB_ID"
due=$(here "${study[@]}" --due --ended "${@:2}")
if [[ -z "$due" ]]; then
    run_stage summary here "${study[@]}"
    exit
fi

read -ra of_runs <<<"${RUN_SBATCH_OPTIONS:-}"
read -ra serial <<<"${SERIAL_SBATCH_OPTIONS:-}"
jobs="" names=()
while IFS=$'\t' read -r name config stages; do
    read -ra todo <<<"$stages"
    options=("${of_runs[@]}")
    [[ "$stages" != tokenize || -z "${serial[*]}" ]] || options=(--nodes=1 --ntasks=1 "${serial[@]}")
    # One process, with the GPUs of its node.
    [[ "$stages" != sample ]] || options+=(--nodes=1 --ntasks=1)
    job=$(submit_afresh --job-name="${name%%:*}" "${options[@]}" \
        slurm/cpt_korean.sh "$config" "${todo[@]}")
    jobs+=:${job%%;*} # a federation appends its cluster's name
    names+=("$name")
    say "job ${job%%;*}: $stages of $config"
done <<<"$due"
# Not afterok: if a run diverges at one of several learning rates, its job fails and the study
# continues.
next=$(submit_afresh "${serial[@]}" --dependency="afterany$jobs" \
    studies/run_study.sh "$STUDY" "${names[@]}")
say "job ${next%%;*} continues after these"
