#!/usr/bin/env bash
#SBATCH --job-name=cpt-korean
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#
# The whole run, from text to a tested Hugging Face folder, in eight stages. Stages that are done
# are skipped, so the same command again continues where it stopped.
#
# Stages that a run does not ask for are skipped, too:
#   clean     needs corpora with a section of that name
#   sample    needs a corpus of self-generated text, which the base writes
#   gate      needs a section of that name
#
#   sbatch slurm/cpt_korean.sh                              on Slurm's nodes, a rank per task or GPU
#   bash slurm/cpt_korean.sh                                all on one machine
#   sbatch --nodes=4 slurm/cpt_korean.sh configs/demo.yaml  another run; so does CONFIG=…
#   sbatch slurm/cpt_korean.sh configs/demo.yaml --set schedule.steps=20       another setting
#   sbatch slurm/cpt_korean.sh configs/demo.yaml convert evaluate              these stages only
#   STAGES="convert evaluate" bash slurm/cpt_korean.sh      these stages only
#   bash slurm/cpt_korean.sh --dry-run                      print the plan, and what would stop the
#                                   run; --gpus and other options of scale-cpt train may follow
#
# Five minutes before the time limit Slurm sends USR1: training saves, and the job requeues itself.
# Settings of the site (account, partition, modules, containers): slurm/site.env.
set -euo pipefail

print_usage() {
    cat <<'USAGE'
usage: bash slurm/cpt_korean.sh [CONFIG] [--set KEY=VALUE]... [STAGE...]
       bash slurm/cpt_korean.sh [CONFIG] --dry-run [options of scale-cpt train]

  CONFIG       a run's YAML file or folder; default: configs/cpt_korean_llama3.2_1b.yaml
  --set        changes a setting, such as --set schedule.steps=20
  STAGE        clean tokenize sample upscale train gate convert evaluate; default: all of them
  --dry-run    prints the plan, and what would stop the run

With sbatch in place of bash it runs on Slurm's nodes. docs/clusters.md has more.
USAGE
}

for argument; do
    if [[ "$argument" == --help || "$argument" == -h ]]; then
        print_usage
        exit 0
    fi
done

script=$(cd "$(dirname "$0")" >/dev/null && pwd)/${0##*/} # before the folder changes
caller_folder=$PWD # relative paths of the command line begin there
project=$(dirname "$0")/..
# sbatch runs a copy of this file from its spool folder: the project is the folder it was called in.
[[ -f "$project/slurm/common.sh" ]] || project=${SLURM_SUBMIT_DIR:-$project}
cd "${PROJECT:-$project}"
source slurm/common.sh || {
    echo "error: call sbatch in the project's root, or set PROJECT" >&2
    exit 2
}
load_site

choose_config "$@"

if [[ "${arguments[0]:-}" == --dry-run ]]; then
    read -ra cluster <<<"$(planned_cluster "$script")"
    planned=("${cluster[@]}" "$CONFIG" "${changes[@]}" "${arguments[@]:1}")
    here python -m pipeline train --dry-run "${planned[@]}"
fi
for argument in "${arguments[@]}"; do
    case "$argument" in
        --dry-run) die "--dry-run: give it before stages and other options" ;;
        --dry*) die "unknown option $argument; did you mean --dry-run?" ;;
        -*) die "unknown option $argument; the options are --dry-run, --set KEY=VALUE and --help" ;;
    esac
done
if [[ -z "$named_config" ]] && ! on_slurm; then
    say "no run is named: this is the default, $CONFIG;" \
        "another is the first argument, as in: bash slurm/cpt_korean.sh configs/demo.yaml"
fi

if ((${#arguments[@]} > 0)); then
    STAGES=${arguments[*]}
fi
STAGES=${STAGES:-$all_stages}
# Before the first of them begins: the last one may be days away.
for stage in $STAGES; do
    [[ " $all_stages " == *" $stage "* ]] ||
        die "STAGES: there is no stage \"$stage\"; choose from $all_stages"
done

# Lets the first stage check that the batch can be divided among the ranks, before hours of
# tokenization.
if [[ " $STAGES " == *" train "* ]]; then
    EXPECTED_WORLD_SIZE=$(count_ranks)
fi
export EXPECTED_WORLD_SIZE
announce "run $CONFIG"
for stage in $STAGES; do
    case "$stage" in
        clean) run_stage clean here python -m pipeline clean "$CONFIG" "${changes[@]}" ;;
        tokenize) run_stage tokenize here python -m pipeline tokenize "$CONFIG" "${changes[@]}" ;;
        sample) run_stage sample here python -m pipeline sample "$CONFIG" "${changes[@]}" ;;
        upscale) run_stage upscale here python -m pipeline upscale "$CONFIG" "${changes[@]}" ;;
        train) run_stage train on_every_rank python -m pipeline train "$CONFIG" "${changes[@]}" ;;
        gate) run_stage gate here python -m pipeline gate "$CONFIG" "${changes[@]}" ;;
        convert) run_stage convert here python -m pipeline convert "$CONFIG" "${changes[@]}" ;;
        evaluate) run_stage evaluate here python -m pipeline evaluate "$CONFIG" "${changes[@]}" ;;
    esac
done
say "done"
