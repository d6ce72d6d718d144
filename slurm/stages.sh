# shellcheck shell=bash
# A stage: told to save and stop at a signal, tried again after a fault. slurm/common.sh sources it.
#
#   run_stage NAME COMMAND…     one stage: has it save and stop at a signal, and tried again after a fault that is not
#                               the user's; stops the script where it fails for good or is interrupted

stop_signal="" # set by the traps: the signal after which no further stage may start
stage_pid=""
stage_began=0
stage_code=0
through_srun="" # whether the stage is srun
restarts_here=0 # without Slurm: how often a stage was started again

run_stage() {
    local name=$1 code when
    shift
    export STAGE=$name
    trap 'woken=true; forward USR1' USR1
    trap 'woken=true; forward TERM' TERM
    trap 'woken=true; forward INT' INT
    # Without Slurm a stage has a process group of its own, so that none of its processes can hide.
    on_slurm || set -m
    while true; do
        say "$name"
        attempt "$@"
        [[ "$stage_code$stop_signal" != 0 ]] || break
        code=$stage_code when=during
        # After a signal: ended by it, or well; but a fault on the way out is a fault.
        if ((stage_code == RESUME_LATER)) || { [[ -n "$stop_signal" ]] && ((stage_code == 0 || stage_code > 128)); }; then
            code=$RESUME_LATER
            ((stage_code != 0)) || when=after
            [[ -n "$stage_pid" ]] || when=before
            [[ "$stop_signal" != INT ]] || ((stage_code <= 128)) || code=$INTERRUPTED
            say "stopped $when $name"
        else
            echo "error: stage $name ended with exit code $stage_code; its first error above says why" >&2
            clear_leftovers
        fi
        another_turn "$name" "$code" || exit "$code"
    done
    set +m
}

# Runs the stage once, and sets stage_code. Not to be called where a shell overlooks errors (if, ||).
attempt() {
    export ATTEMPT=${series:=${SLURM_JOB_ID:-$HOSTNAME-$$-$(date +%s)}}.${SLURM_RESTART_COUNT:-$((restarts_here))}
    through_srun=""
    [[ "$1" != on_every_rank ]] || ! on_slurm || through_srun=true
    stage_pid=""
    stage_code=$RESUME_LATER
    [[ -z "$stop_signal" ]] || return 0 # it came between two stages
    # In the background, because bash runs a trap only between foreground commands.
    "$@" &
    stage_pid=$! stage_began=$SECONDS
    [[ -z "$stop_signal" ]] || forward "$stop_signal" # it came just now
    stage_code=0
    wait_past_signals "$stage_pid" || stage_code=$?
}

forward() {
    local sent
    sent=$(signal_for_stage "$1")
    stop_signal=$1
    say "caught SIG$1: asking the stage to save and stop"
    ((SECONDS - stage_began > 1)) || sleep 1 # a shell that was forked a moment ago loses what its parent traps
    kill -s "$sent" "$stage_pid" 2>/dev/null || true
}

signal_for_stage() {
    if ! on_slurm; then
        echo "$1"
    elif [[ -z "$through_srun" || "$stop_signal $1" == "INT INT" ]]; then
        echo TERM # a background command of a shell without job control does not hear INT
    else
        echo USR1 # srun answers TERM by killing every rank at once; training takes both for "save and stop"
    fi
}

# Ranks that outlive their launcher, and stopped ones, which hear nothing but SIGKILL.
clear_leftovers() {
    local step steps
    if ! on_slurm; then
        kill -s KILL -- "-$stage_pid" 2>/dev/null || true
        return
    fi
    for _ in {1..60}; do
        steps=$(squeue --noheader --steps --jobs="$THIS_JOB" --format=%i 2>/dev/null | grep -v '[a-z]' || true)
        [[ -n "$steps" ]] || return 0
        for step in $steps; do
            scancel --signal=KILL "$step" 2>/dev/null || true
        done
        sleep 0.5
    done
}

# After a save on the way, or a fault that is not the user's, the job queues itself again. Without Slurm the stage is run
# again at once, after a fault only. Fails where the script is to end now.
another_turn() {
    local name=$1 code=$2 why
    if end_is_wanted "$code"; then
        say "the same command goes on from there"
        return 1
    fi
    [[ -n "${CONFIG:-}" ]] || return 1
    if ! why=$(may_go_on "$name" "$code"); then
        [[ -z "$why" ]] || say "no further attempt at $name: $why"
        return 1
    fi
    ! end_is_wanted "$code" || return 1 # somebody asked for it meanwhile
    if on_slurm; then
        say "queueing job $SLURM_JOB_ID again for another attempt at $name: $why"
        requeue_job || true
        return 1
    fi
    restarts_here=$((restarts_here + 1))
    say "another attempt at $name: $why"
}

end_is_wanted() {
    if on_slurm; then
        [[ "$stop_signal" == INT ]] || ! job_is_running
    else
        [[ -n "$stop_signal" ]] || (($1 == RESUME_LATER))
    fi
}
