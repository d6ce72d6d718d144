#!/usr/bin/env bash
#SBATCH --job-name=clean-corpus
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#
# Cleans the corpora of a run that have a section `clean`, one after the other, each as job arrays
# of datatrove's.
#
#   sbatch slurm/clean_corpus.sh configs/….yaml         on this job's partition; so does CONFIG=…
#   bash slurm/clean_corpus.sh configs/….yaml           the cores of this machine
#   … slurm/clean_corpus.sh configs/….yaml --time 04:00:00       further flags go to scale-cpt clean
#
# The arrays end before this script is run again, as a job of its own: it does what they left,
# writes the manifest, and submits the next corpus. If it fails, submit it again: tasks that are
# done are kept.
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

command=(python -m pipeline clean "$CONFIG" "${changes[@]}" "${arguments[@]}")
announce "cleaning for $CONFIG"
if ! on_slurm; then
    run_stage clean here "${command[@]}"
else
    submitted=$(afresh here "${command[@]}" --slurm "$SLURM_JOB_PARTITION")
    echo "$submitted"
    if [[ "$submitted" == *"submitted: job "* ]]; then
        after=afterany:${submitted##*submitted: job }
        again=(slurm/clean_corpus.sh "$CONFIG" "${changes[@]}" "${arguments[@]}")
        next=$(submit_afresh --dependency="$after" "${again[@]}") ||
            die "no job continues after these arrays, as sbatch refused it (above):" \
                "when they have ended, submit this script again"
        say "continued by job $next"
    fi
fi
say "done"
