"""A process's place among the ranks, read from the environment of each launcher."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.errors import LOST_RANK, LayoutError, worth_another_attempt
from pipeline.parallel.ranks import all_gathered
from pipeline.training.checkpointing import Checkpoints
from pipeline.training.launch import Launch, device_index, initialise, read_launch
from tests.distributed import run_ranks

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
MPIRUN_IN_SLURM = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}
EXPECTED = Launch(rank=3, local_rank=1, world_size=4, master_addr="gpu1", master_port=29500)


def far(name: str) -> str:
    return "10.0.0.1"


def near(name: str) -> str:
    return "127.0.1.1"


def nowhere(name: str) -> str:
    raise OSError("Name or service not known")


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN, MPIRUN_IN_SLURM], ids=["torchrun", "srun", "mpirun in Slurm"])
def test_every_launcher_gives_the_same_place(environment):
    launch = read_launch(environment, far)
    assert launch == EXPECTED
    assert read_launch(launch.environment, far) == launch


def test_without_a_launcher_a_process_is_alone_on_any_free_port():
    launch = read_launch({}, nowhere)
    assert (launch.rank, launch.world_size, launch.master_addr) == (0, 1, "127.0.0.1")
    assert launch.master_port == 0


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (BATCH_SCRIPT, "is one of 1 process(es), but 4 were allocated"),
        ({**TORCHRUN, "EXPECTED_WORLD_SIZE": "8"}, "is one of 4 process(es), but 8 were allocated"),
        ({**TORCHRUN, "EXPECTED_WORLD_SIZE": "2"}, "is one of 4 process(es), but 2 were allocated"),
        ({**SRUN, "SLURM_NTASKS": "8"}, "is one of 4 process(es), but 8 were allocated"),
    ],
    ids=["without srun", "fewer than meant", "more than meant", "a step smaller than the job"],
)
def test_a_world_that_is_not_the_allocation_is_refused(environment, complaint):
    with pytest.raises(LayoutError, match=re.escape(complaint)):
        read_launch(environment, far)


def test_the_expected_world_may_be_overridden():
    assert read_launch({**BATCH_SCRIPT, "EXPECTED_WORLD_SIZE": "1"}, far).world_size == 1


def test_torchrun_may_start_several_ranks_a_task():
    assert read_launch({**TORCHRUN, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, far).world_size == 4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE: expected a whole number, found 'four'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK: expected a whole number, found 'nothing'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    ],
)
def test_a_damaged_environment_is_named(change, complaint):
    with pytest.raises(LayoutError, match=complaint):
        read_launch({**TORCHRUN, **change}, far)


def test_an_address_that_does_not_resolve_is_refused():
    with pytest.raises(LayoutError, match=r"MASTER_ADDR gpu1 does not resolve .* set MASTER_ADDR"):
        read_launch(SRUN, nowhere)


def test_a_loopback_address_serves_one_host_only():
    with pytest.raises(LayoutError, match=r"MASTER_ADDR gpu1 is 127\.0\.1\.1 .* 2 hosts cannot all reach"):
        read_launch(SRUN, near)
    assert read_launch({**SRUN, "HOST_COUNT": "1"}, near) == EXPECTED
    assert read_launch(TORCHRUN, near) == EXPECTED


@pytest.mark.parametrize("own", ["127.0.1.1", "::1", None])
def test_a_node_whose_own_name_does_not_resolve_is_named(own):
    def resolve(name: str) -> str:
        if name == socket.gethostname():
            return own or nowhere(name)
        return far(name)

    with pytest.raises(
        LayoutError, match=rf"{socket.gethostname()}: its own name resolves to .* set NETWORK_INTERFACE"
    ):
        read_launch(SRUN, resolve)
    assert read_launch({**SRUN, "GLOO_SOCKET_IFNAME": "ib0"}, resolve) == EXPECTED
    assert read_launch({**SRUN, "HOST_COUNT": "1"}, resolve) == EXPECTED


@pytest.mark.parametrize("address", ["::1", "127.0.0.1"])
def test_loopback_is_known_in_both_families(address):
    with pytest.raises(LayoutError, match="cannot all reach"):
        read_launch(SRUN, lambda name: address)


def test_each_rank_of_a_node_takes_a_gpu_of_its_own():
    assert [device_index(rank, 4, bound=False) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1, bound=True) == 0
    with pytest.raises(LayoutError, match="rank 1 of this node has no GPU, 1 are visible"):
        device_index(1, 1, bound=False)


def test_no_thread_of_the_group_outlives_it():
    """Such threads sometimes abort the process; the import stands for transformers', which comes after the start."""
    program = """
import os, pathlib, sys, time
from pipeline.training import launch

def threads():
    names = []
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        try:
            names.append(path.read_text().strip())
        except OSError:
            pass  # it ended just now
    return names

def wait_until(gloo_runs):
    deadline = time.monotonic() + 600
    while any("gloo" in name for name in threads()) is not gloo_runs:
        assert time.monotonic() < deadline, threads()
        time.sleep(0.01)

launch.initialise(launch.read_launch({}))
import torch.distributed.nn.functional
wait_until(gloo_runs=True)  # a thread gives itself its name, and may not have come to that yet
launch.finish()
wait_until(gloo_runs=False)
"""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def sockets_of_checkpoints(folder):
    """How many sockets the group of a run's checkpoints holds when all ranks have spoken in it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    initialise(Launch(rank, rank, world_size, "127.0.0.1", 29500))

    def sockets():
        found = 0
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found += str(path.readlink()).startswith("socket:")
        return found

    before = sockets()
    group = Checkpoints(folder, None, None, keep_last=1)._group
    assert all_gathered(rank, group) == list(range(world_size))
    return sockets() - before


def test_the_group_of_checkpoints_connects_a_rank_to_its_neighbours_only(tmp_path):
    """Of 1,000 ranks each would otherwise hold 1,000 sockets, and often may open 1,024 files."""
    for opened in run_ranks(sockets_of_checkpoints, 6, tmp_path):
        assert 0 < opened <= 3  # one listens, two neighbours in a ring


@pytest.mark.parametrize(("end", "code"), [("sys.exit(75)", 75), ("sys.exit()", 0), ("pass", 0), ("1 / 0", 1)])
def test_a_process_exits_with_its_code_and_output_and_without_clean_up(end, code):
    program = f"""
import atexit, sys
from pipeline.training import launch

def program():
    print("last words")
    {end}

atexit.register(print, "cleaned up")
launch.leave_after(program)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == code
    assert result.stdout == "last words\n" + ("cleaned up\n" if "/" in end else "")
    assert ("ZeroDivisionError" in result.stderr) == ("/" in end)


def test_a_port_in_use_is_reported_in_one_line_and_retried():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Launch(0, 0, 2, "127.0.0.1", taken.getsockname()[1])
        environment = {**os.environ, **place.environment, "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "pipeline.train", "configs/demo.yaml"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"127.0.0.1:{place.master_port}" in said[0] and "MASTER_PORT" in said[0], result.stderr
    assert "Traceback" not in result.stderr
    assert worth_another_attempt(result.returncode) and result.returncode == LOST_RANK
