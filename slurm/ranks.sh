# shellcheck shell=bash disable=SC2154  # common.sh sets `container`
# Runs a stage's command, on one process or on all ranks. slurm/common.sh sources this file.
#
#   here COMMAND…               a serial stage: one process, on this node
#   over_mpi COMMAND…           a stage that finds its ranks through MPI
#   on_every_rank COMMAND…      a process per rank: over the allocation by srun, or on this machine
#   overlap_own_step            lets srun start a step within the step that this shell is
#   count_ranks                 prints how many ranks on_every_rank starts
#   planned_cluster SCRIPT      prints the allocation, or what sbatch would request, as options of
#                               a dry run
#
# The first three replace the background shell of run_stage, so that a signal to the stage reaches
# the command itself.

here() { exec "${container[@]}" "$@"; }

# The launcher is the host's. srun needs a Slurm that was built with PMIx ("srun --mpi=list"); set
# MPI_LAUNCHER=mpirun where it was not.
over_mpi() {
    local launcher
    read -ra launcher <<<"${MPI_LAUNCHER:-srun --mpi=pmix}"
    overlap_own_step
    exec "${launcher[@]}" "${container[@]}" "$@"
}

on_every_rank() {
    EXPECTED_WORLD_SIZE=$(count_ranks)
    export EXPECTED_WORLD_SIZE
    if on_slurm; then
        over_the_allocation "$@"
    else
        on_this_machine "$@"
    fi
}

over_the_allocation() {
    local nodes=$SLURM_JOB_NUM_NODES ranks=$EXPECTED_WORLD_SIZE options
    local ranks_per_node=$(((ranks + nodes - 1) / nodes))
    find_rendezvous
    share_the_cores "${SLURM_CPUS_ON_NODE:-1}" "$ranks_per_node"
    say "$ranks ranks over $nodes nodes ($SLURM_JOB_NODELIST)," \
        "rendezvous at $MASTER_ADDR:$MASTER_PORT"
    read -ra options <<<"${SRUN_OPTIONS:-}"
    overlap_own_step
    export SLURM_EXIT_ERROR=$SLURM_FAULT # distinguishes faults of srun from the user's
    # Not --kill-on-bad-exit: it would kill the ranks that still save when the first has ended with
    # RESUME_LATER. --wait: a tracker may take a minute to end its run. --gpu-bind=none: every rank
    # sees its node's GPUs, also under --gpus-per-task; NCCL's direct copies fail between ranks that
    # cannot see each other's. LOCAL_RANK chooses one.
    exec srun --nodes="$nodes" --ntasks="$ranks" --ntasks-per-node="$ranks_per_node" --overcommit \
        --cpu-bind=none --gpu-bind=none --export=ALL --wait="${EXIT_GRACE_S:-120}" \
        "${options[@]}" bash slurm/launch.sh "$@"
}

# `srun --pty bash` is a step that holds the whole allocation: a step within it would wait for ever.
overlap_own_step() {
    in_step || return 0
    say "this shell is step $SLURM_STEP_ID of job $SLURM_JOB_ID:" \
        "the ranks share its CPUs and GPUs (srun --overlap)"
    export SLURM_OVERLAP=1 # srun's variable for --overlap, which versions before 20.11 do not have
}

on_this_machine() {
    say "no Slurm allocation: $EXPECTED_WORLD_SIZE processes on this machine (NPROC sets how many)"
    share_the_cores "$(nproc)" "$EXPECTED_WORLD_SIZE"
    [[ "$1" == python ]] || die "outside Slurm on_every_rank starts python only, not $1"
    here python -m pipeline.local_ranks "$EXPECTED_WORLD_SIZE" "${@:2}"
}

# The ranks of the allocation; without one NPROC, else one per GPU of this machine, else two.
count_ranks() {
    local nodes=${SLURM_JOB_NUM_NODES:-1} ranks
    if on_slurm; then
        ranks=${SLURM_NTASKS:-$nodes}
        # One task per node but several GPUs: --ntasks-per-node was not set. One rank per GPU.
        if ((ranks == nodes && ${SLURM_GPUS_ON_NODE:-0} > 1)); then
            ranks=$((nodes * SLURM_GPUS_ON_NODE))
        fi
    else
        ranks=${NPROC:-$(gpus_here)}
    fi
    echo $((ranks > 0 ? ranks : 2))
}

# Without an allocation: what the script's #SBATCH lines and sbatch's environment request; with
# NPROC, or where there is no Slurm, nothing, which means this machine. Where Slurm knows of no GPU,
# the ranks are CPU processes.
planned_cluster() {
    local nodes ranks tasks gpus=${SBATCH_GPUS_PER_NODE:-} mebibytes="" what=GPUs of_cpu=""
    if on_slurm; then
        nodes=$SLURM_JOB_NUM_NODES ranks=$(count_ranks)
        ((${SLURM_GPUS_ON_NODE:-0} > 0 || $(gpus_here) > 0)) || of_cpu=" --on-cpu"
    elif [[ -n "${NPROC:-}" ]] || ! command -v sbatch >/dev/null; then
        return
    else
        nodes=$(requested "$1" nodes N)
        nodes=${nodes:-1} # what sbatch allocates to a script that does not say
        tasks=$(requested "$1" ntasks-per-node ntasks-per-node)
        [[ -n "$gpus" ]] || mebibytes=$(memory_without_gpus "${SBATCH_PARTITION:-}")
        gpus=${gpus##*:} # h100:8
        # As count_ranks: a rank per task, or per GPU if each node has one task.
        ((${tasks:-1} > 1)) || tasks=${gpus:-1}
        ranks=$((nodes * tasks))
        if [[ -n "$mebibytes" ]]; then
            what="CPU processes"
            of_cpu=" --on-cpu --gpu-memory-gib $((mebibytes / tasks / 1024 + 1))"
            say "Slurm knows of no GPU there; SBATCH_GPUS_PER_NODE=8 plans some" >&2
        fi
        say "a plan of what sbatch would request: $ranks $what on $nodes nodes;" \
            "NPROC=2 plans 2 processes here" >&2
    fi
    echo "--gpus $ranks --gpus-per-node $(((ranks + nodes - 1) / nodes))$of_cpu"
}

# The number that an #SBATCH line of the script $1 gives for the option --$2 or -$3.
requested() { sed -nE "s/^#SBATCH +(--$2[= ]|-$3 *)([0-9]+).*/\2/p" "$1"; }

# The MiB of a node of the partition $1, by default Slurm's own default, if none of its nodes has
# GPUs; else nothing.
memory_without_gpus() {
    local name resources mebibytes least=""
    command -v sinfo >/dev/null || return 0
    while IFS='|' read -r name resources mebibytes; do
        # The default partition has a star behind its name.
        [[ "$name" == "$1" || "$name" == "$1*" || (-z "$1" && "$name" == *"*") ]] || continue
        [[ "$resources" != *gpu* ]] || return 0
        mebibytes=${mebibytes%+} # of nodes that differ: the least
        ((mebibytes > ${least:-mebibytes})) || least=$mebibytes
    done < <(sinfo --noheader --format="%P|%G|%m" 2>/dev/null)
    echo "$least"
}

# The first node's address as Slurm knows it; a port computed from the job's number, below the
# kernel's ephemeral ports.
find_rendezvous() {
    local nodes first
    nodes=$(ask_slurm show node "$SLURM_JOB_NODELIST" --oneliner) || exit "$SLURM_FAULT"
    read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    : "${MASTER_ADDR:=$(grep "^NodeName=$first " <<<"$nodes" | node_field NodeAddr)}"
    # Another port at each restart, in case another program uses the one before.
    : "${MASTER_PORT:=$((15000 + (SLURM_JOB_ID + 7919 * ${SLURM_RESTART_COUNT:-0}) % 15000))}"
    # On a test cluster all nodes are one machine. Only then may the address be a loopback address.
    : "${HOST_COUNT:=$(node_field NodeHostName <<<"$nodes" | sort -u | wc -l)}"
    export MASTER_ADDR MASTER_PORT HOST_COUNT
}

node_field() { sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }

gpus_here() {
    if [[ "${DS_ACCELERATOR:-}" != cpu ]] && command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus | grep -c '^GPU' || true # grep fails if it counts none
    else
        echo 0
    fi
}

share_the_cores() {
    local threads=$(($1 / $2))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}
