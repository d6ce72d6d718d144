# shellcheck shell=bash
# Runs a stage, passes signals on to it, and retries it after a fault. slurm/common.sh sources this
# file.
#
#   run_stage NAME COMMAND…     runs a stage: at a signal it saves and stops; after a fault that is
#                               not the user's it is tried again; the script ends if the stage fails
#                               for good or is interrupted

stop_signal="" # set by the traps; once set, no further stage starts
stage_pid=""
stage_runs="" # not empty while it does
stage_began=0
stage_code=0
through_srun="" # not empty if the stage is run by srun
other_steps=""  # the job's steps that are not the stage's; empty if it starts none, or if unknown
restarts_here=0 # without Slurm: how often a stage was restarted
requeues_without_run="" # not empty if a job without CONFIG may requeue itself

run_stage() {
    local name=$1 code
    shift
    export STAGE=$name
    trap 'woken=true; forward USR1' USR1
    trap 'woken=true; forward TERM' TERM
    trap 'woken=true; forward INT' INT
    trap 'woken=true; forward HUP' HUP # the terminal is gone
    trap 'woken=true' PIPE             # nobody reads the output, as in "| tee log" after Ctrl-C
    trap 'exit 131' QUIT
    trap end_stage EXIT
    # Without Slurm a stage has its own process group, so that all its processes can be killed.
    on_slurm || set -m
    while true; do
        say "$name"
        attempt "$@"
        code=$stage_code
        if ((code == 0)) && [[ -z "$stop_signal" ]]; then
            break
        elif has_stopped "$code"; then
            # Ctrl-C that killed the stage is the user's will, and no reason to resume.
            if [[ "$stop_signal" == INT ]] && ((code > 128)); then
                code=$INTERRUPTED
            elif ((code != INTERRUPTED)); then
                code=$RESUME_LATER
            fi
            say "stopped at $name"
        else
            complain "error: stage $name ended with exit code $code; its first error above says why"
            clear_leftovers
        fi
        try_again "$name" "$code" || exit "$code"
    done
    set +m
}

# Whether a stage with this exit code was stopped and saved. After a signal, success and death by a
# signal (128 + its number) both mean that; another exit code is a fault.
has_stopped() {
    (($1 == RESUME_LATER)) && return 0
    [[ -n "$stop_signal" ]] && (($1 == 0 || $1 > 128))
}

# Runs the stage once, and sets stage_code. Do not call it in a condition (if, ||), where bash
# ignores errors.
attempt() {
    : "${series:=${SLURM_JOB_ID:-$HOSTNAME-$$-$(date +%s)}}"
    export ATTEMPT=$series.${SLURM_RESTART_COUNT:-$restarts_here}
    through_srun="" other_steps=""
    if on_slurm; then
        [[ "$1" != on_every_rank ]] || through_srun=true
        [[ "$1" != on_every_rank && "$1" != over_mpi ]] || other_steps=$(list_other_steps) || true
    fi
    stage_code=$RESUME_LATER
    [[ -z "$stop_signal" ]] || return 0 # the signal came between two stages
    # In the background: bash runs a trap only after the foreground command has ended.
    "$@" &
    stage_pid=$! stage_began=$SECONDS stage_runs=true
    [[ -z "$stop_signal" ]] || forward "$stop_signal" # the signal came before stage_pid was set
    stage_code=0
    wait_past_signals "$stage_pid" || stage_code=$?
    stage_runs=""
}

# However this script ends, its stage is asked to save and stop.
end_stage() {
    local sent=TERM
    [[ -z "$through_srun" ]] || sent=USR1 # at TERM srun kills every rank
    [[ -z "$stage_runs" ]] || kill -s "$sent" "$stage_pid" 2>/dev/null || true
}

# Passes signal $1 on to the stage, as a signal that its command takes as "save and stop".
forward() {
    local sent=$1 is_second_interrupt=""
    [[ "$stop_signal $1" != "INT INT" ]] || is_second_interrupt=true
    if ! on_slurm; then
        [[ "$1" != HUP ]] || sent=TERM
    elif [[ -n "$through_srun" && -z "$is_second_interrupt" ]]; then
        sent=USR1 # as in end_stage
    else
        sent=TERM # a background command of a shell without job control ignores INT
    fi
    [[ "$stop_signal" == INT ]] || stop_signal=$1 # the user's wish, whatever comes before the save
    # A shell that was just forked still has its parent's traps and would lose the signal. Another
    # Ctrl-C ends the sleep.
    ((SECONDS - stage_began > 1)) || sleep 1 || true
    kill -s "$sent" "$stage_pid" 2>/dev/null || true
    say "caught SIG$1: asked the stage to save and stop"
}

# Before a stage starts its own: the step that this script runs in, and all others. Where squeue
# does not answer it prints nothing, as nothing may be killed then.
list_other_steps() { list_steps && echo "$THIS_JOB.${SLURM_STEP_ID:-batch}"; }

# The job's steps that srun started; Slurm's own have names, such as batch.
list_steps() {
    local steps
    steps=$(squeue --noheader --steps --jobs="$THIS_JOB" --format=%i 2>/dev/null) || return 1
    grep -v '[a-z]' <<<"$steps" || true
}

# Kills ranks that outlived their launcher, and stopped ones, which react to SIGKILL only. Steps
# from before the stage stay: one may be the user's shell, in which this script runs.
clear_leftovers() {
    local step steps
    if ! on_slurm; then
        kill -s KILL -- "-$stage_pid" 2>/dev/null || true
        return
    fi
    [[ -n "$other_steps" ]] || return 0
    for _ in {1..60}; do
        steps=$(list_steps | grep -vxF "$other_steps" || true)
        [[ -n "$steps" ]] || return 0
        for step in $steps; do
            scancel --signal=KILL "$step" 2>/dev/null || true
        done
        sleep 0.5
    done
}

# After a save, or a fault that is not the user's, the job requeues itself. Without Slurm the stage
# is restarted at once, after a fault only. Fails if the script has to end now.
try_again() {
    local name=$1 code=$2 why
    if end_is_wanted "$code"; then
        say "the same command resumes from there"
        return 1
    fi
    [[ -n "${CONFIG:-}" ]] || { [[ -n "$requeues_without_run" ]] && on_slurm; } || return 1
    if ! why=$(may_go_on "$name" "$code"); then
        [[ -z "$why" ]] || say "no further attempt at $name: $why"
        return 1
    fi
    ! end_is_wanted "$code" || return 1 # a signal came meanwhile
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
