"""`sbatch slurm/cpt_korean.sh` over two nodes: a short demo, from text to a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipeline.data.tokenize.documents import texts
from tests.data.helpers import write_jsonl
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_THE_CPU, PROJECT
from tests.training.runs import losses

pytestmark = pytest.mark.slurm

STEPS = 12


def short_demo(folder: Path) -> Path:
    """configs/demo.yaml in `folder`, without its gate and what belongs to it, with fewer documents
    and steps."""
    run = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    run.update(name="short", folder=str(folder / "run"))
    run["data"]["folder"] = str(folder / "tokens")
    del run["data"]["corpora"]["self_generated"], run["gate"]
    for name in ("open_rows", "open_gains", "low_rank"):
        del run["method"][name]
    for name, corpus in run["data"]["corpora"].items():
        for key, count in (("input", 40), ("heldout_input", 6)):
            if key in corpus:
                read = texts([str(PROJECT / corpus[key][0])])
                corpus[key] = [
                    str(
                        write_jsonl(
                            folder / f"{name}.{key}.jsonl", [next(read) for _ in range(count)]
                        )
                    )
                ]
    run["schedule"]["steps"] = STEPS
    run["validation"] = {"every_steps": STEPS, "max_sequences": 8}
    run["checkpoints"] = {"every_steps": 4}
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump(run, allow_unicode=True), encoding="utf-8")
    return config


def written(folder: Path) -> dict[str, int]:
    """Every file of the stages that may be skipped, with the time it was written."""
    rooms = [
        folder / "tokens",
        *(folder / "run" / room for room in ("initial_expansion", "checkpoints", "hf")),
    ]
    return {
        str(path): path.stat().st_mtime_ns
        for room in rooms
        for path in room.rglob("*")
        if path.is_file()
    }


def test_an_interrupted_job_goes_from_text_to_a_tested_model(
    slurm_cluster: Cluster, tmp_path: Path
):
    config = short_demo(tmp_path)

    def submit() -> int:
        """As the documentation says: from the project's root."""
        options = (f"--output={tmp_path}/%j.out", "slurm/cpt_korean.sh", config)
        return slurm_cluster.sbatch(*options, cwd=PROJECT, **ON_THE_CPU)

    job = submit()
    slurm_cluster.wait_for(job, lambda _: (tmp_path / "run" / "checkpoints" / "latest").exists())
    slurm_cluster.run("scancel", "--signal=USR1", str(job))
    slurm_cluster.start_now(job)
    end = slurm_cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), slurm_cluster.evidence(job)
    output = slurm_cluster.output(job)
    assert (
        "2 ranks over 2 nodes (n[1-2])" in output
        and "stopped at train" in output
        and "queueing job" in output
    )
    assert len(losses(tmp_path / "run")) == STEPS

    # The base is unchanged at step 0, Korean is learned, little is trained, and the export agrees
    # with the model.
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["step0_max_abs_logit_difference"] == 0.0
    before, after = (
        summary["scores"][when]["korean"]["perplexity"] for when in ("before", "after")
    )
    assert after < before
    assert 0 < summary["trainable_parameters"] < summary["total_parameters"]
    assert summary["export_max_abs_logit_difference"] <= 1e-4
    assert (Path(summary["hf_folder"]) / "config.json").exists()

    before = written(tmp_path)
    assert {Path(name).suffix for name in before} >= {".bin", ".idx", ".safetensors", ".json"}
    again = submit()
    assert slurm_cluster.wait(again) == ("COMPLETED", 0, 0), slurm_cluster.evidence(again)
    assert written(tmp_path) == before, "the same command again does nothing twice"
