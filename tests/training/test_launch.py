"""A process's place among the ranks, read from the environment of each launcher; and the signals
that stop it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from pipeline.errors import LOST_RANK, LayoutError, worth_another_attempt
from pipeline.training import launch
from pipeline.training.launch import (
    Launch,
    StopSignals,
    device_index,
    read_launch,
    slurm_binds_gpus,
)
from tests.terminal import terminal

MASTER = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **MASTER}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    **MASTER,
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
MPIRUN_IN_SLURM = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
    **MASTER,
}
EXPECTED = Launch(rank=3, local_rank=1, world_size=4, master_addr="gpu1", master_port=29500)


@pytest.fixture
def addresses(monkeypatch):
    """What names resolve to: by default "10.0.0.1"; None stands for a name that does not."""
    found: dict[str, str | None] = {}

    def resolved(name: str) -> str:
        if (address := found.get(name, "10.0.0.1")) is None:
            raise OSError("Name or service not known")
        return address

    monkeypatch.setattr("pipeline.training.launch.resolved", resolved)
    return found


@pytest.mark.parametrize(
    "environment", [TORCHRUN, SRUN, MPIRUN_IN_SLURM], ids=["torchrun", "srun", "mpirun in Slurm"]
)
def test_every_launcher_gives_the_same_place(addresses, environment):
    launch = read_launch(environment)
    assert launch == EXPECTED
    assert read_launch(launch.environment) == launch


def test_without_a_launcher_a_process_is_alone_on_any_free_port():
    assert read_launch({}) == Launch(0, 0, 1, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (BATCH_SCRIPT, "is one of 1 process(es), but 4 were allocated"),  # without srun
        ({**TORCHRUN, "EXPECTED_WORLD_SIZE": "8"}, "is one of 4 process(es), but 8 were allocated"),
        ({**TORCHRUN, "EXPECTED_WORLD_SIZE": "2"}, "is one of 4 process(es), but 2 were allocated"),
        ({**SRUN, "SLURM_NTASKS": "8"}, "is one of 4 process(es), but 8 were allocated"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE: expected a whole number, found 'four'"),
        ({**TORCHRUN, "LOCAL_RANK": ""}, "LOCAL_RANK: expected a whole number, found 'nothing'"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR not set"),
    ],
)
def test_a_world_that_is_not_the_allocation_or_damaged_is_refused(
    addresses, environment, complaint
):
    with pytest.raises(LayoutError, match=re.escape(complaint)):
        read_launch(environment)


def test_the_expected_world_may_be_overridden_and_torchrun_may_start_several_ranks_a_task(
    addresses,
):
    assert read_launch({**BATCH_SCRIPT, "EXPECTED_WORLD_SIZE": "1"}).world_size == 1
    assert (
        read_launch({**TORCHRUN, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}).world_size == 4
    )


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "::1", None])
def test_an_address_that_other_hosts_cannot_reach_is_refused(addresses, address):
    here = socket.gethostname()
    addresses["gpu1"] = address
    with pytest.raises(
        LayoutError,
        match=r"MASTER_ADDR gpu1 (is .* cannot reach|does not resolve).* set MASTER_ADDR",
    ):
        read_launch(SRUN)
    assert read_launch({**SRUN, "HOST_COUNT": "1"}) == EXPECTED
    assert read_launch(TORCHRUN) == EXPECTED

    addresses.update({"gpu1": "10.0.0.1", here: address})
    with pytest.raises(
        LayoutError, match=rf"{here}: the node's own name {here} .* set NETWORK_INTERFACE"
    ):
        read_launch(SRUN)
    assert read_launch({**SRUN, "GLOO_SOCKET_IFNAME": "ib0"}) == EXPECTED
    assert read_launch({**SRUN, "HOST_COUNT": "1"}) == EXPECTED


def test_each_rank_of_a_node_takes_a_gpu_of_its_own():
    assert [device_index(rank, 4, bound=False) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1, bound=True) == 0
    with pytest.raises(LayoutError, match="rank 1 of this node has no GPU, 1 are visible"):
        device_index(1, 1, bound=False)


def test_a_port_in_use_is_reported_in_one_line_and_retried():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = Launch(0, 0, 2, "127.0.0.1", taken.getsockname()[1])
        environment = {**os.environ, **place.environment, "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-m", "pipeline", "train", "configs/demo.yaml"]
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert (
        len(said) == 1 and f"127.0.0.1:{place.master_port}" in said[0] and "MASTER_PORT" in said[0]
    ), result.stderr
    assert "Traceback" not in result.stderr
    assert worth_another_attempt(result.returncode) and result.returncode == LOST_RANK


def test_a_signal_is_recorded_and_a_second_ctrl_c_interrupts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(launch.time, "monotonic", lambda: now[0])
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == signal.SIGUSR1
        for now[0] in (100.0, 100.1):  # one keystroke, passed on twice
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        now[0] = 101.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("variables", "bound"),
    [
        ({}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "gres/gpu:1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, False),
    ],
)
def test_a_task_may_see_its_own_gpu_alone(variables, bound):
    assert slurm_binds_gpus(variables) == bound


LEAVES_AFTER_A_HANGUP = """
import os, signal, sys
from pipeline.training.launch import leave_after

def program():
    try:
        while True:
            print("works", file=sys.stderr)
            sys.stderr.flush()
    except OSError:  # what could not be written waits in the buffer
        sys.exit(75)

signal.signal(signal.SIGHUP, signal.SIG_IGN)
leave_after(program)
"""


def test_a_lost_terminal_does_not_change_how_a_rank_ends(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with terminal([sys.executable, "-c", LEAVES_AFTER_A_HANGUP], environment, tmp_path) as opened:
        opened.wait_for("works\r\n")
        opened.hang_up()
        assert opened.end() == 75
