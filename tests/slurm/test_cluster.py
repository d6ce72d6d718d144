"""The test cluster behaves like a real one where our scripts rely on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.slurm


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
