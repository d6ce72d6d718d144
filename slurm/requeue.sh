# shellcheck shell=bash
# Whether a job is requeued, and how. slurm/common.sh sources this file; it runs nothing by itself.
#
#   ask_slurm ARGUMENT…          runs scontrol, again and again until slurmctld answers
#   job_is_running               fails if Slurm is already ending or requeueing the job
#   may_go_on STAGE EXIT_CODE    whether the stage gets another attempt; prints why
#   requeue_job                  requeues the job

# In an array's last task SLURM_JOB_ID is the id of the whole array: scontrol would requeue every
# task.
THIS_JOB=${SLURM_JOB_ID:-}
[[ -z "${SLURM_ARRAY_TASK_ID:-}" ]] || THIS_JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
readonly THIS_JOB
# Answers of scontrol after which asking again is useless.
readonly REFUSED="disabled|Invalid|denied|Only batch"

# Repeats the request for SLURM_PATIENCE_S while slurmctld is busy or failing over.
ask_slurm() {
    local answer asked_again="" deadline=$((SECONDS + ${SLURM_PATIENCE_S:-300}))
    until answer=$(scontrol "$@" 2>&1); do
        if [[ "$answer" =~ $REFUSED ]] || ((SECONDS >= deadline)); then
            complain "error: scontrol $*: $answer"
            return 1
        fi
        [[ -n "$asked_again" ]] ||
            complain "scontrol $*: $answer; asking again for ${SLURM_PATIENCE_S:-300} s"
        asked_again=true
        sleep 2
    done
    [[ -z "$answer" ]] || echo "$answer"
}

# Not true of cancelled, preempted and timed-out jobs: Slurm changes their state before it sends a
# signal.
job_is_running() { [[ "$(ask_slurm show job "$THIS_JOB" --oneliner)" == *" JobState=RUNNING "* ]]; }

# scale-cpt may-retry decides. If it fails itself (an unmounted file system), a fault that is not
# the user's is tried again while the job, or this call of the script, has restarted less often than
# it may without progress. So it is where there is no run, in whose folder attempts are counted.
may_go_on() {
    local stage=$1 code=$2 verdict=0
    local most=${MAX_RESTARTS:-100} idle=${MAX_RESTARTS_WITHOUT_PROGRESS:-3}
    if [[ -z "${CONFIG:-}" ]]; then
        may_restart "$code" "$idle" "$most"
        return
    fi
    # scale-cpt may-retry would meet a fault of the configuration again, and print it again.
    [[ "$code" != "$CONFIG_ERROR" ]] || return 1
    # shellcheck disable=SC2154  # choose_config and launch.sh set `changes`
    "${container[@]}" python -m pipeline may-retry "$CONFIG" "${changes[@]}" --stage "$stage" \
        --exit-code "$code" --without-progress "$idle" --most "$most" || verdict=$?
    case "$verdict" in
        0) return 0 ;;
        2 | 3) return 1 ;; # the configuration is at fault; no
    esac
    echo "scale-cpt may-retry itself ended with exit code $verdict"
    may_restart "$code" "$idle" "$most" >/dev/null
}

may_restart() {
    local code=$1 limit=$(($2 < $3 ? $2 : $3)) restarts=${SLURM_RESTART_COUNT:-${restarts_here:-0}}
    case "$code" in
        "$USER_ERROR" | "$CONFIG_ERROR" | "$FOLDER_TAKEN" | "$INTERRUPTED") return 1 ;;
    esac
    if ((restarts >= limit)); then
        echo "it was restarted $restarts times, of at most $limit"
        return 1
    fi
    echo "restart $((restarts + 1)) of at most $limit"
}

requeue_job() {
    trap '' USR1 TERM INT # a requeue begins with SIGTERM to this script
    ask_slurm requeue "$THIS_JOB" && return
    say "job $THIS_JOB is not queued again; submit it again to continue"
    return 1
}
