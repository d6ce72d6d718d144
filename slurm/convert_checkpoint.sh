#!/usr/bin/env bash
#SBATCH --job-name=convert-checkpoint
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@10
#
# Converts a checkpoint to a Hugging Face folder and verifies it, on one node. The flags are those
# of scale-cpt convert.
#
#   sbatch slurm/convert_checkpoint.sh runs/demo       a run's newest checkpoint; so does CONFIG=…
#   sbatch slurm/convert_checkpoint.sh runs/demo --format scale --output exported
#   sbatch slurm/convert_checkpoint.sh --checkpoint runs/demo/checkpoints/step_00000200 \
#       --base models/mine --output exported           a checkpoint without its run
#   bash slurm/convert_checkpoint.sh runs/demo         on this machine
#
# A folder appears only when it is complete and verified. Ten seconds before the time limit the job
# requeues itself, and begins again: give it a longer --time where it never ends.
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

# The options' paths begin where the user stands, as the run's does. `from_caller` cannot tell of an
# output, which does not exist yet.
path_of() {
    if [[ "$1" == --output && "$2" != /* && ! "$caller_folder" -ef "$PWD" ]]; then
        echo "$caller_folder/$2"
    else
        from_caller "$2"
    fi
}
options=() before=""
for argument; do
    case "$before $argument" in
        *" --output="* | *" --checkpoint="* | *" --base="*)
            argument=${argument%%=*}=$(path_of "${argument%%=*}" "${argument#*=}")
            ;;
        "--output "* | "--checkpoint "* | "--base "*) argument=$(path_of "$before" "$argument") ;;
    esac
    options+=("$argument")
    before=$argument
done
set -- "${options[@]}"

if [[ " $*" == *" --checkpoint"* ]]; then
    unset CONFIG # the checkpoint is named without its run
    # shellcheck disable=SC2034  # try_again reads it
    requeues_without_run=true
    announce "conversion of a checkpoint"
    run_stage convert here python -m pipeline convert "$@"
else
    choose_config "$@"
    announce "conversion of $CONFIG"
    run_stage convert here python -m pipeline convert "$CONFIG" "${changes[@]}" "${arguments[@]}"
fi
say "done"
