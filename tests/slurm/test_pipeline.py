"""`sbatch slurm/cpt_korean.sh` over two nodes: the demo, shortened, from text to a Hugging Face folder."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PROJECT

pytestmark = pytest.mark.slurm

SCRIPT = PROJECT / "slurm" / "cpt_korean.sh"
STEPS = 12


def first_documents(source: Path, count: int, target: Path) -> str:
    with source.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as raw:
        lines = itertools.islice(io.TextIOWrapper(raw, encoding="utf-8"), count)
        target.write_text("".join(lines), encoding="utf-8")
    return str(target)


def short_demo(folder: Path, *, gated: bool) -> Path:
    """configs/demo.yaml with fewer documents and steps, and everything it writes in `folder`."""
    run: dict[str, Any] = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    run.update(name="short", folder=str(folder / "run"))
    run.pop("upscaled", None)
    run["data"]["folder"] = str(folder / "tokens")
    for name, corpus in run["data"]["corpora"].items():
        for key, count in (("input", 40), ("heldout_input", 6)):
            if key in corpus:
                source = PROJECT / corpus[key][0]
                corpus[key] = [first_documents(source, count, folder / f"{name}.{key}.jsonl")]
    if gated:
        run["data"]["corpora"]["own_text"]["sample"] = {"tokens": 4000}
        run["gate"] = {"tokens": 400, "max_open_fraction": 0.05}
    else:
        del run["data"]["corpora"]["own_text"], run["gate"]
    run["schedule"]["steps"] = STEPS
    run["validation"] = {"every_steps": STEPS, "max_sequences": 8}
    run["checkpoints"] = {"every_steps": 4}
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump(run, allow_unicode=True), encoding="utf-8")
    return config


def submit(cluster: Cluster, folder: Path, config: Path, *stages: str) -> int:
    """Submits as the documentation says: from the project's root, with the run in CONFIG."""
    env = {"CONFIG": str(config), "STAGES": " ".join(stages), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return cluster.sbatch(SCRIPT, env=env, args=(f"--output={folder}/%j.out",), cwd=PROJECT)


def check_summary(summary: dict[str, Any]) -> None:
    """The base is unchanged at step 0, Korean is learned, little is trained, and the export agrees with the model."""
    assert summary["step0_max_abs_logit_difference"] == 0.0
    assert summary["korean_perplexity_after"] < summary["korean_perplexity_before"]
    assert 0 < summary["trainable_parameters"] < summary["total_parameters"]
    # Two Adam moments a trained parameter; ZeRO-3 pads each partition, and holds nothing for the frozen ones.
    moments = 2 * summary["trainable_parameters"]
    assert moments <= summary["optimizer_state_elements"] < moments * 1.02
    assert summary["export_max_abs_logit_difference"] <= 1e-4
    assert (Path(summary["hf_folder"]) / "config.json").exists()


def written(folder: Path) -> dict[str, int]:
    """Every file of the stages that may be skipped, with the time it was written."""
    rooms = [folder / "tokens", *(folder / "run" / room for room in ("upscaled", "checkpoints", "hf"))]
    return {str(path): path.stat().st_mtime_ns for room in rooms for path in room.rglob("*") if path.is_file()}


def interrupted(cluster: Cluster, folder: Path, config: Path, *stages: str) -> dict[str, Any]:
    """The summary of a job that is stopped once during training, over two nodes."""
    job = submit(cluster, folder, config, *stages)
    cluster.wait_for(job, lambda _: (folder / "run" / "checkpoints" / "latest").exists())
    cluster.run("scancel", "--signal=USR1", str(job))
    cluster.start_now(job)
    end = cluster.wait(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), cluster.evidence(job)
    output = cluster.output(job)
    assert "2 ranks over 2 nodes (n[1-2])" in output
    assert "stopped during train" in output and "queueing job" in output
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    check_summary(summary)
    return summary


def test_an_interrupted_job_goes_from_text_to_a_tested_model(slurm_cluster: Cluster, tmp_path: Path):
    stages = ("tokenize", "upscale", "train", "convert", "evaluate")
    interrupted(slurm_cluster, tmp_path, short_demo(tmp_path, gated=False), *stages)


def test_with_a_gate_too_and_again_for_nothing(slurm_cluster: Cluster, tmp_path: Path):
    config = short_demo(tmp_path, gated=True)
    summary = interrupted(slurm_cluster, tmp_path, config)
    # The gate keeps English near the base's, often exactly there.
    assert summary["english_perplexity_after"] == pytest.approx(summary["english_perplexity_before"], rel=0.2)
    assert summary["rehearsal_fraction"] == 0.0625
    assert 0 <= summary["gate_open_english"] < 0.5 < summary["gate_open_korean"] <= 1
    assert summary["closed_max_abs_logit_difference"] in (0.0, None)

    before = written(tmp_path)
    assert {Path(name).suffix for name in before} >= {".bin", ".idx", ".safetensors", ".json"}
    again = submit(slurm_cluster, tmp_path, config)
    end = slurm_cluster.wait(again)
    assert (end.state, end.restarts) == ("COMPLETED", 0), slurm_cluster.evidence(again)
    assert written(tmp_path) == before, "the same command again does nothing twice"
