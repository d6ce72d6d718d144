"""Tokenizing as a job array on two nodes: killed, submitted again, the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.data.helpers import PROJECT, STORIES260K, contents, run_tool
from tests.slurm.cluster import Cluster
from tests.texts import REVIEWS, STORIES
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

SCRIPT = PROJECT / "slurm" / "tokenize_korean.sh"
SMALL_UNITS = ("--unit-mib", "0.25")


def configuration(folder: Path) -> Path:
    """A run that reads the demo's corpora into `folder/tokens`."""
    corpora = {
        "korean": {"input": [str(REVIEWS)], "heldout_fraction": 0.1},
        "english": {"input": [str(STORIES)], "role": "replay"},
    }
    described = {
        "name": "t",
        "folder": str(folder),
        "base": str(STORIES260K),
        "method": {"name": "fft"},
        "data": {"folder": str(folder / "tokens"), "sequence_length": 64, "corpora": corpora},
        "schedule": {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 0.1},
        "deepspeed": str(PROJECT / "ds_configs" / "zero1.json"),
    }
    folder.mkdir(exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run_tool(configuration(folder), "--workers", "1", *SMALL_UNITS)
    assert done.returncode == 0, done.stderr
    return contents(folder / "tokens")


def submit(cluster: Cluster, config: Path, *options: str, env: dict[str, str] | None = None) -> int:
    arguments = (f"--output={config.parent}/job-%A_%a.out", *options)
    command = ["sbatch", "--parsable", *arguments, str(SCRIPT), *SMALL_UNITS]
    return int(cluster.run(*command, env={"CONFIG": str(config), **(env or {})}, cwd=PROJECT))


def outputs(config: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(config.parent.glob("job-*.out")))


def wait_for_units(config: Path, count: int) -> None:
    def done() -> bool:
        return len(list((config.parent / "tokens").glob("*/.units/*-*[0-9].json"))) >= count

    assert wait_until(done, every_s=0.02), outputs(config)


def wait_for_array(cluster: Cluster, job: int) -> set[str]:
    """Waits until no task of the array is in the queue any more; returns the states they ended in."""

    def tasks() -> list[str]:
        return cluster.run("squeue", "--noheader", "--array", f"--jobs={job}", "--states=all", "--format=%T").split()

    gone = wait_until(lambda: not {"PENDING", "RUNNING", "COMPLETING"} & set(tasks()))
    assert gone, cluster.run("squeue", "--long") + cluster.run("sinfo", "--long", "--Node")
    return set(tasks())


# What each task of an array sources before its work: it says who it is, and waits for the others.
TOGETHER = """\
echo $$ > {folder}/written.$SLURM_ARRAY_TASK_ID
mv {folder}/written.$SLURM_ARRAY_TASK_ID {folder}/task.$SLURM_ARRAY_TASK_ID.pid
while [[ ! -e {folder}/go ]]; do sleep 0.1; done
"""


def test_an_array_over_two_nodes(slurm_cluster: Cluster, tmp_path: Path, undisturbed: dict[str, str]):
    """Four tasks, all killed at work; then three, which find most of it done."""
    config = configuration(tmp_path / "run")
    site = tmp_path / "site.env"
    site.write_text(TOGETHER.format(folder=tmp_path))
    killed = submit(slurm_cluster, config, "--array=0-3", env={"SITE_ENV": str(site)})
    assert wait_until(lambda: len(list(tmp_path.glob("task.*.pid"))) == 4), outputs(config)
    (tmp_path / "go").touch()
    wait_for_units(config, 5)
    # Slurm takes a while, in which one might come to its end.
    for script in tmp_path.glob("task.*.pid"):
        for process in psutil.Process(int(script.read_text())).children(recursive=True):
            process.suspend()
    slurm_cluster.run("scancel", "--signal=KILL", "--full", str(killed))
    assert "COMPLETED" not in wait_for_array(slurm_cluster, killed)
    job = submit(slurm_cluster, config, "--array=10-30:10")
    assert wait_for_array(slurm_cluster, job) == {"COMPLETED"}, outputs(config)
    assert contents(tmp_path / "run" / "tokens") == undisturbed
