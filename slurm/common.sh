# shellcheck shell=bash
# What the scripts of this folder share. They source it from the project's root; it runs nothing by itself.
#
#   load_site                   settings of the site, modules, virtual environment
#   choose_config               CONFIG, the run's YAML
#   run_stage NAME COMMAND…     one stage: forwards signals to it, stops the script where it fails or is interrupted
#   here COMMAND…               a serial stage: one process, on this node
#   on_every_rank COMMAND…      one process a rank: over the allocation with srun, else on this machine

readonly RESUME_LATER=75 # sysexits.h: a temporary failure. A stage that saved its work and wants to go on ends with it.
stop_signal=""           # set by the traps: the signal after which no further stage may start
stage_pid=""

say() { echo "[$(date +%H:%M:%S)] $*"; }

die() {
    echo "error: $*" >&2
    exit 1
}

on_slurm() { [[ -n "${SLURM_JOB_ID:-}" ]]; }

load_site() {
    local site=${SITE_ENV:-slurm/site.env}
    # shellcheck source=slurm/site.env
    [[ ! -f "$site" ]] || source "$site"
    if [[ -n "${MODULES:-}" ]]; then
        local modules
        read -ra modules <<<"$MODULES"
        module load "${modules[@]}" || die "$site: cannot load the modules \"$MODULES\""
    fi
    if [[ -f "${VENV:=.venv}/bin/activate" ]]; then
        # shellcheck source=/dev/null
        source "$VENV/bin/activate"
    fi
    if [[ -n "${NETWORK_INTERFACE:-}" ]]; then
        export NCCL_SOCKET_IFNAME=$NETWORK_INTERFACE GLOO_SOCKET_IFNAME=$NETWORK_INTERFACE
    fi
    export PYTHONUNBUFFERED=1
    command -v python >/dev/null || die "no python on PATH: run \"make install\" first, or set VENV or MODULES in $site"
}

choose_config() {
    : "${CONFIG:=configs/cpt_korean_llama3.2_1b.yaml}"
    [[ -f "$CONFIG" ]] || die "CONFIG=$CONFIG: no such file; the runs that come with the project are in configs/"
}

# --- stages ----------------------------------------------------------------------------------------------------------

run_stage() {
    local name=$1 code=0
    shift
    trap 'forward USR1' USR1
    trap 'forward TERM' TERM INT
    say "$name"
    # In the background, because bash runs a trap only between foreground commands.
    "$@" &
    stage_pid=$!
    wait "$stage_pid" || code=$?
    while kill -0 "$stage_pid" 2>/dev/null; do # wait also returns at each trapped signal
        code=0
        wait "$stage_pid" || code=$?
    done
    # After a signal: ended by it, or well; but a fault on the way out is a fault.
    if ((code == RESUME_LATER)) || { [[ -n "$stop_signal" ]] && ((code == 0 || code > 128)); }; then
        resume_later "$name"
    fi
    if ((code != 0)); then
        echo "error: stage $name ended with exit code $code; its first error above says why" >&2
        exit "$code"
    fi
}

forward() {
    stop_signal=$1
    say "caught SIG$1: asking the stage to save and stop"
    kill -s "$1" "$stage_pid" 2>/dev/null || true
}

# The work so far is safe and not finished: ask Slurm for another turn, unless somebody asked for the end.
resume_later() {
    local restarts=${SLURM_RESTART_COUNT:-0} most=${MAX_RESTARTS:-100}
    trap '' USR1 TERM INT # a requeue begins with SIGTERM, which has nothing to tell here
    if ! on_slurm || [[ "$stop_signal" == TERM ]]; then
        say "stopped during $1; the same command goes on from there"
    elif ((restarts >= most)); then
        die "stopped during $1 after $restarts restarts, and MAX_RESTARTS is $most; submit again to go on"
    else
        say "stopped during $1; queueing job $SLURM_JOB_ID again (restart $((restarts + 1)))"
        scontrol requeue "$SLURM_JOB_ID" || say "Slurm does not requeue this job; submit again to go on"
    fi
    exit "$RESUME_LATER"
}

# --- processes -------------------------------------------------------------------------------------------------------
# Both replace the background shell of run_stage, so that a signal to the stage reaches the command itself.

here() {
    local container
    read -ra container <<<"${CONTAINER:-}"
    exec "${container[@]}" "$@"
}

on_every_rank() {
    if on_slurm; then
        over_the_allocation "$@"
    else
        on_this_machine "$@"
    fi
}

over_the_allocation() {
    local nodes=$SLURM_JOB_NUM_NODES ranks=${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES} options
    # One task a node, but several GPUs there: the tasks were left at their default. One rank a GPU.
    if ((ranks == nodes && ${SLURM_GPUS_ON_NODE:-0} > 1)); then
        ranks=$((nodes * SLURM_GPUS_ON_NODE))
    fi
    local ranks_per_node=$(((ranks + nodes - 1) / nodes))
    find_rendezvous
    share_the_cores "${SLURM_CPUS_ON_NODE:-1}" "$ranks_per_node"
    say "$ranks ranks over $nodes nodes ($SLURM_JOB_NODELIST), rendezvous at $MASTER_ADDR:$MASTER_PORT"
    read -ra options <<<"${SRUN_OPTIONS:-}"
    export EXPECTED_WORLD_SIZE=$ranks
    # Not --kill-on-bad-exit: the first rank to end with RESUME_LATER would have the others killed while they finish.
    exec srun --nodes="$nodes" --ntasks="$ranks" --ntasks-per-node="$ranks_per_node" --overcommit --cpu-bind=none \
        --export=ALL --wait="${EXIT_GRACE_S:-60}" "${options[@]}" bash slurm/launch.sh "$@"
}

on_this_machine() {
    local ranks=${NPROC:-$(gpus_here)}
    ((ranks > 0)) || ranks=2
    say "no Slurm allocation: $ranks processes on this machine (NPROC sets how many)"
    share_the_cores "$(nproc)" "$ranks"
    export EXPECTED_WORLD_SIZE=$ranks
    [[ "$1" == python ]] || die "outside Slurm on_every_rank starts python only, not $1"
    here python tools/launch_here.py --ranks "$ranks" "${@:2}"
}

# The first node's address as Slurm itself reaches it; a port of the job's own, below those the kernel hands out.
find_rendezvous() {
    local first
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    : "${MASTER_ADDR:=$(node_field NodeAddr "$first")}"
    : "${MASTER_PORT:=$((15000 + SLURM_JOB_ID % 15000))}"
    # Several Slurm nodes may be one machine (a test cluster); only then may they meet on a loopback address.
    : "${HOST_COUNT:=$(node_field NodeHostName "$SLURM_JOB_NODELIST" | sort -u | wc -l)}"
    export MASTER_ADDR MASTER_PORT HOST_COUNT
}

node_field() { scontrol show node "$2" --oneliner | sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }

gpus_here() {
    if [[ "${DS_ACCELERATOR:-}" != cpu ]] && command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus | grep -c '^GPU' || true # grep fails where it counts none
    else
        echo 0
    fi
}

share_the_cores() {
    local threads=$(($1 / $2))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}
