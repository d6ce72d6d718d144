# shellcheck shell=bash
# Whether a job gets another turn, and how Slurm is asked for it. slurm/common.sh sources it; it runs nothing by itself.
#
#   ask_slurm ARGUMENT…          what scontrol says, once slurmctld answers
#   job_is_running               fails where the job's end, or its next turn, is in other hands already
#   may_go_on STAGE EXIT_CODE    the one decision about another turn; prints why
#   requeue_job                  queues the job again

# SLURM_JOB_ID of an array's last task is that of the whole array, whose every task scontrol would then take.
readonly THIS_JOB=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-${SLURM_JOB_ID:-}}
readonly REFUSED="disabled|Invalid|denied|Only batch" # what scontrol says where asking again is of no use

# A slurmctld that is busy, or failing over, is asked again for SLURM_PATIENCE_S.
ask_slurm() {
    local answer asked_again="" deadline=$((SECONDS + ${SLURM_PATIENCE_S:-300}))
    until answer=$(scontrol "$@" 2>&1); do
        if [[ "$answer" =~ $REFUSED ]] || ((SECONDS >= deadline)); then
            echo "error: scontrol $*: $answer" >&2
            return 1
        fi
        [[ -n "$asked_again" ]] || echo "scontrol $*: $answer; asking again for ${SLURM_PATIENCE_S:-300} s" >&2
        asked_again=true
        sleep 2
    done
    [[ -z "$answer" ]] || echo "$answer"
}

# Cancelled, preempted and timed-out jobs are not: Slurm changes their state before it sends any signal.
job_is_running() { [[ "$(ask_slurm show job "$THIS_JOB" --oneliner)" == *" JobState=RUNNING "* ]]; }

# tools/may_retry.py decides. Where it fails itself (a file system that is away), the run shall not end for that: then
# every fault that is not the user's is tried again, until MAX_RESTARTS.
may_go_on() {
    local stage=$1 code=$2 most=${MAX_RESTARTS:-100} verdict=0 container
    read -ra container <<<"${CONTAINER:-}"
    "${container[@]}" python tools/may_retry.py --config "$CONFIG" --stage "$stage" --exit-code "$code" \
        --without-progress "${MAX_RESTARTS_WITHOUT_PROGRESS:-3}" --most "$most" || verdict=$?
    case "$verdict" in
        0) return 0 ;;
        2 | 3) return 1 ;; # the configuration is at fault; no
    esac
    echo "tools/may_retry.py itself ended with exit code $verdict"
    case "$code" in
        "$USER_ERROR" | "$CONFIG_ERROR" | "$FOLDER_TAKEN" | "$INTERRUPTED") return 1 ;;
        *) ((${SLURM_RESTART_COUNT:-${restarts_here:-0}} < most)) ;;
    esac
}

requeue_job() {
    trap '' USR1 TERM INT # a requeue begins with SIGTERM, which has nothing to tell here
    ask_slurm requeue "$THIS_JOB" && return
    say "job $THIS_JOB is not queued again; submit again to go on"
    return 1
}
