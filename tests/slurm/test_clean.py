"""Cleaning as job arrays, which gives the same bytes as on one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.cleaning.clean import clean
from pipeline.cleaning.stages import cleaning_jobs
from pipeline.config.run import load_config
from tests.cleaning.test_clean import run_of
from tests.data.helpers import PROJECT, contents, stories
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm


def shards(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in contents(folder).items() if name.endswith(".zst")}


def test_arrays_write_what_one_machine_writes(slurm_cluster: Cluster, tmp_path: Path) -> None:
    texts = stories(40)[:40]
    for name in ("alone", "arrays"):
        (tmp_path / name).mkdir()
        run_of(tmp_path / name, [*texts, *texts[:5]], language="en")
    (job,) = cleaning_jobs(load_config(tmp_path / "alone" / "run.yaml").data)
    clean(job, workers=1)
    config, output = tmp_path / "arrays" / "run.yaml", tmp_path / "arrays" / "tokens" / "crawl.clean"
    command = ("sbatch", "--parsable", f"--output={tmp_path}/%j.out", "slurm/clean_corpus.sh", str(config))
    first = int(slurm_cluster.run(*command, cwd=PROJECT))
    assert slurm_cluster.wait(first).exit_code == 0, slurm_cluster.evidence(first)
    last = int(re.findall(r"continued by job (\d+)", slurm_cluster.output(first))[0])
    assert slurm_cluster.wait(last).exit_code == 0, slurm_cluster.evidence(last)
    assert shards(output) == shards(job.output)
    ended = slurm_cluster.run("squeue", "--noheader", "--states=all", "--format=%j %T")
    assert "clean-write COMPLETED" in ended  # the last job found that done
