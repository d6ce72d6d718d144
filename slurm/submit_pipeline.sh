#!/usr/bin/env bash
# The run as a chain of jobs, each with the nodes it needs: tokenization → training → conversion → evaluation.
# A job starts when the one before has succeeded; where one fails, those after it are cancelled.
# The options of this script are sbatch's, for the training job:
#
#   CONFIG=configs/demo.yaml bash slurm/submit_pipeline.sh --nodes=4 --ntasks-per-node=8
#
# Without Slurm the same stages run one after the other on this machine. Again, what is done already is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
source slurm/common.sh
load_site
choose_config
export CONFIG

if ! command -v sbatch >/dev/null; then
    say "no sbatch here: the stages run on this machine"
    bash slurm/tokenize_korean.sh
    STAGES="upscale train" bash slurm/cpt_korean.sh
    bash slurm/convert_checkpoint.sh
    exec bash slurm/evaluate.sh
fi

read -ra serial <<<"${SERIAL_SBATCH_OPTIONS:-}"

# submit NAME AFTER OPTION… SCRIPT: sets `job` to the new job's id.
submit() {
    local name=$1 after=$2
    shift 2
    job=$(sbatch --parsable ${after:+--dependency="afterok:$after" --kill-on-invalid-dep=yes} "$@")
    job=${job%%;*} # a federation appends its cluster's name
    echo "$name: job $job${after:+, after job $after}"
}

submit tokenization "" "${serial[@]}" slurm/tokenize_korean.sh
STAGES="upscale train" submit training "$job" "$@" slurm/cpt_korean.sh
submit conversion "$job" "${serial[@]}" slurm/convert_checkpoint.sh
submit evaluation "$job" "${serial[@]}" slurm/evaluate.sh
