#!/usr/bin/env bash
# The run as a chain of jobs, each with the nodes it needs: cleaning → tokenization → training →
# conversion → evaluation. A job starts when the one before has succeeded. If one fails, those after
# it are cancelled.
#
# The options of this script are sbatch's, for the training job:
#
#   bash slurm/submit_pipeline.sh configs/demo.yaml --nodes=4 --ntasks-per-node=8
#   CONFIG=configs/demo.yaml bash slurm/submit_pipeline.sh
#
# SERIAL_SBATCH_OPTIONS are the options of the other jobs.
#
#   cleaning        on one node, for corpora with a section `clean` only; slurm/clean_corpus.sh
#                   spreads it over many
#   tokenization    an array of eight tasks of one node each, which share the work and may start at
#                   different times; training waits for all eight
#   training        the base writes self-generated text at its beginning, and a gate is fitted at its
#                   end, on the GPUs of its first node
#
# Without Slurm the stages run one after the other on this machine. Stages that are done are
# skipped.
set -euo pipefail
caller_folder=$PWD # relative paths of the command line begin there
cd "$(dirname "$0")/.."
source slurm/common.sh
load_site
choose_config "$@"

case "${arguments[0]:-}" in
    --dry-run) exec bash slurm/cpt_korean.sh "$CONFIG" "${changes[@]}" "${arguments[@]}" ;;
    --help | -h) exec sed -n '2,/^set/s/^# \{0,1\}//p' slurm/submit_pipeline.sh ;;
esac
if ! command -v sbatch >/dev/null; then
    ((${#arguments[@]} == 0)) || say "there is no Slurm: these options are not used: ${arguments[*]}"
    exec bash slurm/cpt_korean.sh "$CONFIG" "${changes[@]}"
fi

read -ra serial <<<"${SERIAL_SBATCH_OPTIONS:-}"

# submit NAME OPTION… SCRIPT ARGUMENT…: submits a job that starts after `job`, and sets `job` to its
# id.
job=""
submit() {
    local name=$1 after=$job
    shift
    local dependency=()
    [[ -z "$after" ]] || dependency=(--dependency="afterok:$after" --kill-on-invalid-dep=yes)
    job=$(submit_afresh --job-name="$name" "${dependency[@]}" "$@")
    job=${job%%;*} # a federation appends its cluster's name
    echo "$name: job $job${after:+, after job $after}"
}

run=("$CONFIG" "${changes[@]}")
one_node=(--nodes=1 "${serial[@]}")
# Conversion and evaluation do not save: they need no time before the limit.
one_node_to_the_end=(--nodes=1 --signal=B:USR1@10 "${serial[@]}")

# A job for cleaning only if a corpus has a section `clean`: `config show` indents it by six blanks,
# below data.corpora.<name>, and prints `clean: null` where there is none. Errors are hidden here,
# because the first job reports a configuration that cannot be read.
settings=$(here python -m pipeline config show "${run[@]}" 2>/dev/null || true)
if grep -q '^      clean:$' <<<"$settings"; then
    submit cleaning "${one_node[@]}" slurm/cpt_korean.sh "${run[@]}" clean
fi
submit tokenization "${serial[@]}" slurm/tokenize_korean.sh "${run[@]}"
submit training "${arguments[@]}" slurm/cpt_korean.sh "${run[@]}" sample upscale train gate
submit conversion "${one_node_to_the_end[@]}" slurm/cpt_korean.sh "${run[@]}" convert
submit evaluation "${one_node_to_the_end[@]}" slurm/cpt_korean.sh "${run[@]}" evaluate
