"""The test cluster behaves like a real one where our scripts rely on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.conftest import run_scenario
from tests.slurm.jobs import script
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm


def test_a_scenario_runs_again_after_a_slurmd_crashed(slurm_cluster: Cluster, tmp_path: Path):
    attempts = []

    def scenario(cluster: Cluster, folder: Path) -> None:
        attempts.append(folder)
        if len(attempts) == 1:
            pid = int((cluster.folder / "slurmd.n2.pid").read_text(encoding="utf-8"))
            os.kill(pid, signal.SIGSEGV)
        job = cluster.sbatch(script(folder, "sleep 3; echo ended"), args=("--nodelist=n2",), cwd=folder)
        assert cluster.wait(job).state == "COMPLETED"

    run_scenario(scenario, slurm_cluster, lambda: Path(tempfile.mkdtemp(dir=tmp_path)))
    assert len(attempts) == 2
    assert slurm_cluster.crashes == 1


@pytest.mark.usefixtures("slurm_installed")
def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path):
    tests = "import time; from tests.slurm.cluster import guarded_cluster\nwith guarded_cluster() as c:\n"
    tests += " c.run('sbatch', '--wrap=exec sleep 1234.5', '--chdir=/tmp', '--output=/dev/null')\n"
    tests += " print(c.folder, flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", tests], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert processes_of(folder)
        process.kill()
    assert wait_until(lambda: not folder.exists() and not processes_of(folder)), processes_of(folder)


def processes_of(folder: Path) -> list[str]:
    """The processes, jobs' and daemons', which know of the cluster in `folder`."""
    found = []
    for process in psutil.process_iter(["name", "environ"]):
        if str(folder) in (process.info["environ"] or {}).get("SLURM_CONF", ""):
            found.append(process.info["name"])
    return found
