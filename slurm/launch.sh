#!/usr/bin/env bash
# One rank: srun starts this once per task. It sets torch's variables from Slurm's and runs the
# command.
#
# Rank 0 also requeues the job if the batch script was killed: Slurm considers such a job failed,
# and requeues jobs itself only when nodes are lost. When a job ends, Slurm sends SIGTERM to its
# remaining processes and waits KillWait seconds, enough to ask why it ended. A requeued job keeps
# its number, its options and its dependent jobs; docs/adr/0011-one-job-a-run-folder.md says why
# there is no second job instead.
set -uo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
source slurm/common.sh
((RANK == 0)) || exec "${container[@]}" "$@"

changes=() # may_go_on reads them
for argument; do
    [[ "$argument" != --set=* ]] || changes+=("$argument")
done

# shellcheck disable=SC2317  # the trap reaches it
batch_script_was_killed() {
    for _ in {1..10}; do
        case "$(scontrol show job "$THIS_JOB" --oneliner)" in
            # Still running: the signal may have been for the ranks alone.
            *" JobState=RUNNING "*) kill -0 "$rank" 2>/dev/null || return 1 ;;
            *" JobState=COMPLETING "*" ExitCode=0:9 "*) return 0 ;;
            *" JobState=FAILED "*" ExitCode=0:9 "*) return 0 ;;
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

# Slurm signals the whole process group, so the command has received the signal already.
trap 'woken=true; guard' TERM
trap 'woken=true' USR1 INT
"${container[@]}" "$@" &
rank=$!
wait_past_signals "$rank"
