# shellcheck shell=bash
# Functions of all scripts in this folder, which source it from the project's root. It runs nothing
# by itself.
#
#   load_site                   settings of the site, modules, virtual environment
#   choose_config ARGUMENT…     CONFIG, the run's YAML or folder, which may be the first argument;
#                               sets `changes` to every --set KEY=VALUE, as options of a stage, and
#                               `arguments` to the others
#   from_caller PATH            a path of the command line, as seen from the project
#   afresh COMMAND…             runs a command without the variables of the job that calls it
#   submit_afresh ARGUMENT…     sbatch in that way; prints the new job's id
#   say, complain WORD…         print a line, to stdout with the time, or to stderr
#   announce WHAT               prints the job's first line, and whether Slurm will not requeue it
#   wait_past_signals PID       waits for a background command and returns its exit code, whatever
#                               traps run meanwhile
#
# and run_stage (slurm/stages.sh), here, on_every_rank, count_ranks and planned_cluster
# (slurm/ranks.sh).

# Exit codes, as pipeline/errors.py has them.
readonly USER_ERROR=1
readonly CONFIG_ERROR=2
readonly SLURM_FAULT=71
readonly FOLDER_TAKEN=73
readonly RESUME_LATER=75 # the stage saved its work and has to continue
readonly INTERRUPTED=130

read -ra container <<<"${CONTAINER:-}" # put before every python; again by load_site
source slurm/requeue.sh
source slurm/stages.sh
source slurm/ranks.sh

say() { tell 1 "$(printf '[%(%H:%M:%S)T] ' -1)$*"; }

complain() { tell 2 "$*"; }

die() {
    complain "error: $*"
    exit 1
}

# Prints a line to the file descriptor $1. Ctrl-C also ends a `tee` that reads it: then the line
# goes to stderr, and if nobody reads that either, nowhere. Output that is lost must not end the
# script before its stage.
tell() {
    [[ ! -t 2 ]] || printf '\r\e[K' >&2 # in place of a progress bar
    # shellcheck disable=SC2261  # in this order: the line itself may go to stderr
    echo "$2" >&"$1" 2>/dev/null || echo "$2" >&2 2>/dev/null || true
}

# Bash's wait also returns at each trapped signal, so every trap sets `woken` first.
wait_past_signals() {
    local code
    woken=true
    while [[ -n "$woken" ]]; do
        woken="" code=0
        wait "$1" || code=$?
    done
    return "$code"
}

on_slurm() { [[ -n "${SLURM_JOB_ID:-}" ]]; }

# Whether this shell is a step of its own, as in `srun --pty bash`; a batch script is none.
in_step() { on_slurm && [[ -n "${SLURM_STEP_ID:-}" ]]; }

# A container has the job's variables, and often not Slurm's commands.
need_slurm_commands() {
    on_slurm && ! command -v scontrol >/dev/null || return 0
    local job=$SLURM_JOB_ID nodes=${SLURM_JOB_NUM_NODES:-1}
    ((nodes == 1)) || die "this is job $job on $nodes nodes, and there is no scontrol on PATH" \
        "(inside a container?): start the script outside, with CONTAINER set in slurm/site.env;" \
        "or unset SLURM_JOB_ID, to use this node alone"
    say "this is job $job, and there is no scontrol on PATH (inside a container?):" \
        "everything runs on this node, and the job is not queued again"
    unset SLURM_JOB_ID SLURM_RESTART_COUNT
}

load_site() {
    local site=${SITE_ENV:-slurm/site.env}
    # shellcheck source=slurm/site.env
    [[ ! -f "$site" ]] || source "$site"
    set +u # modules and activation scripts may use unset variables
    if [[ -n "${MODULES:-}" ]]; then
        local modules
        read -ra modules <<<"$MODULES"
        module load "${modules[@]}" || die "$site: cannot load the modules \"$MODULES\""
    fi
    if [[ -f "${VENV:=.venv}/bin/activate" ]]; then
        # shellcheck source=/dev/null
        source "$VENV/bin/activate"
    fi
    set -u
    if [[ -n "${NETWORK_INTERFACE:-}" ]]; then
        export NCCL_SOCKET_IFNAME=$NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$NETWORK_INTERFACE
    fi
    export PYTHONUNBUFFERED=1
    need_slurm_commands
    read -ra container <<<"${CONTAINER:-}"
    if ((${#container[@]})); then
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} # this checkout's code, not the image's
        command -v "${container[0]}" >/dev/null ||
            die "CONTAINER: no ${container[0]} on PATH; load its module in $site"
    else
        command -v python >/dev/null ||
            die "no python on PATH: run \"make install\" first, or set VENV or MODULES in $site"
    fi
}

# A job inherits its submitter's environment, in which srun would take the submitting job's
# SLURM_MEM_PER_CPU, SLURM_GPUS_PER_TASK and the like for its options.
afresh() (
    for name in "${!SLURM_@}"; do
        case "$name" in
            SLURM_CONF* | SLURM_JWT | SLURM_PATIENCE_S | SLURM_FAULT) ;;
            *) unset "$name" ;;
        esac
    done
    "$@"
)

submit_afresh() { afresh sbatch --parsable "$@"; }

all_stages="clean tokenize sample upscale train gate convert evaluate"

# With SBATCH_EXPORT=NONE a job sees its arguments but not the submitter's CONFIG.
choose_config() {
    # The name of a stage is no configuration: CONFIG=run.yaml bash slurm/cpt_korean.sh convert
    if [[ $# != 0 && "$1" != -* && " $all_stages " != *" $1 "* ]]; then
        CONFIG=$1
        shift
    fi
    # shellcheck disable=SC2034  # cpt_korean.sh says where a run has none
    named_config=${CONFIG:-}
    # shellcheck disable=SC2034  # the scripts read them
    arguments=() changes=()
    while (($#)); do
        case "$1" in
            --set=*) changes+=("$1") ;;
            --set)
                (($# > 1)) || die "--set: expected KEY=VALUE after it"
                changes+=("--set=$2")
                shift
                ;;
            *) arguments+=("$1") ;;
        esac
        shift
    done
    export CONFIG=${CONFIG:-configs/cpt_korean_llama3.2_1b.yaml}
    CONFIG=$(from_caller "$CONFIG")
    [[ -e "$CONFIG" ]] || die "CONFIG=$CONFIG: no such file or run folder in ${caller_folder:-$PWD}" \
        "or in the project's folder, $PWD;" \
        "the runs that come with the project are in configs/"
}

# A relative path begins where the user stands or, if nothing is there, at the project.
from_caller() {
    local path=$1
    if [[ "$path" != /* && ! "${caller_folder:-$PWD}" -ef "$PWD" && -e "$caller_folder/$path" ]]; then
        path=$caller_folder/$path
    fi
    echo "$path"
}

announce() {
    say "$1 in $PWD${SLURM_JOB_ID:+, job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}}"
    local record=""
    ! on_slurm || record=$(scontrol show job "$THIS_JOB" --oneliner 2>/dev/null || true)
    if [[ "$record" == *" Requeue=0 "* ]]; then
        say "Slurm will not queue this job again (Requeue=0):" \
            "after a stop or a fault, submit it again"
    fi
}
