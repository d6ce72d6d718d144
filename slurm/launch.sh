#!/usr/bin/env bash
# One rank: srun starts this once a task. It gives Slurm's numbers the names that torch knows and runs the command.
#
# The first rank also has its job queued again when the batch script was killed: Slurm calls such a job failed, and
# requeues for nothing but lost nodes. When a job ends for whatever reason, Slurm sends SIGTERM to what is left of it and
# waits KillWait seconds: time enough to ask why it ended. The job keeps its number, its options and the jobs that wait
# for it; docs/adr/0011-one-job-a-run-folder.md says why no second job waits instead.
set -uo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
read -ra container <<<"${CONTAINER:-}"
((RANK == 0)) || exec "${container[@]}" "$@"

source slurm/common.sh

# shellcheck disable=SC2317  # the trap reaches it
batch_script_was_killed() {
    for _ in {1..10}; do
        case "$(scontrol show job "$THIS_JOB" --oneliner)" in
            *" JobState=RUNNING "*) kill -0 "$rank" 2>/dev/null || return 1 ;; # the signal was for the ranks alone?
            *" JobState=COMPLETING "*" ExitCode=0:9 "* | *" JobState=FAILED "*" ExitCode=0:9 "*) return 0 ;;
            *) return 1 ;;
        esac
        sleep 0.5
    done
    return 1
}

# shellcheck disable=SC2317
guard() {
    if batch_script_was_killed && may_go_on "$STAGE" 137; then
        requeue_job
    fi
}

# Slurm's signals reach the whole process group: the command has them already.
trap 'woken=true; guard' TERM
trap 'woken=true' USR1 INT
"${container[@]}" "$@" &
rank=$!
wait_past_signals "$rank"
