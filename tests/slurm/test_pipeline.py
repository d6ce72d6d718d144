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

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPT = PROJECT / "slurm" / "cpt_korean.sh"
STEPS = 16


def first_documents(source: Path, count: int, target: Path) -> str:
    with source.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as raw:
        lines = itertools.islice(io.TextIOWrapper(raw, encoding="utf-8"), count)
        target.write_text("".join(lines), encoding="utf-8")
    return str(target)


def short_demo(folder: Path) -> Path:
    """configs/demo.yaml with fewer documents and steps, and everything it writes in `folder`."""
    run: dict[str, Any] = yaml.safe_load((PROJECT / "configs" / "demo.yaml").read_text(encoding="utf-8"))
    run.update(name="short", folder=str(folder / "run"))
    run.pop("upscaled", None)
    run["data"]["folder"] = str(folder / "tokens")
    for name, corpus in run["data"]["corpora"].items():
        for key, count in (("input", 60), ("heldout_input", 10)):
            if key in corpus:
                source = PROJECT / corpus[key][0]
                corpus[key] = [first_documents(source, count, folder / f"{name}.{key}.jsonl")]
    run["schedule"]["steps"] = STEPS
    run["validation"] = {"every_steps": STEPS, "max_sequences": 8}
    run["checkpoints"] = {"every_steps": 4}
    config = folder / "short.yaml"
    config.write_text(yaml.safe_dump(run, allow_unicode=True), encoding="utf-8")
    return config


def submit(cluster: Cluster, folder: Path, config: Path) -> int:
    """Submits as the documentation says: from the project's root, with the run in CONFIG."""
    env = {"CONFIG": str(config), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return cluster.sbatch(SCRIPT, env=env, args=(f"--output={folder}/%j.out",), cwd=PROJECT)


def check_summary(summary: dict[str, Any]) -> None:
    """What a run promises: nothing lost at the start, Korean learned, little trained, an export that agrees."""
    assert summary["step0_max_abs_logit_difference"] == 0.0
    assert summary["korean_perplexity_after"] < summary["korean_perplexity_before"]
    assert summary["english_perplexity_after"] > 1
    assert summary["english_perplexity_after"] != summary["english_perplexity_before"]
    assert 0 < summary["trainable_parameters"] < summary["total_parameters"]
    # Two Adam moments a trained parameter; ZeRO-3 pads each partition, and holds nothing for the frozen ones.
    moments = 2 * summary["trainable_parameters"]
    assert moments <= summary["optimizer_state_elements"] < moments * 1.02
    assert summary["export_max_abs_logit_difference"] <= 1e-4


def written(folder: Path) -> dict[str, int]:
    """Every file of the stages that may be skipped, with the time it was written."""
    rooms = [folder / "tokens", *(folder / "run" / room for room in ("upscaled", "checkpoints", "hf"))]
    return {str(path): path.stat().st_mtime_ns for room in rooms for path in room.rglob("*") if path.is_file()}


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every training step, as the run logged them."""
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


@pytest.fixture(scope="module")
def undisturbed(slurm_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(slurm_cluster, folder, short_demo(folder))
    end = slurm_cluster.wait(job)
    output = slurm_cluster.output(job)
    assert (end.state, end.restarts) == ("COMPLETED", 0), slurm_cluster.evidence(job)
    assert "2 ranks over 2 nodes (n[1-2])" in output
    return folder


def test_one_sbatch_goes_from_text_to_a_tested_model(undisturbed: Path):
    summary = json.loads((undisturbed / "run" / "summary.json").read_text(encoding="utf-8"))
    check_summary(summary)
    assert (Path(summary["hf_folder"]) / "config.json").exists()
    assert [step for step, _ in losses(undisturbed)] == list(range(1, STEPS + 1))


def test_the_same_command_again_does_nothing_twice(slurm_cluster: Cluster, undisturbed: Path):
    before = written(undisturbed)
    assert {Path(name).suffix for name in before} >= {".bin", ".idx", ".safetensors", ".json"}
    again = submit(slurm_cluster, undisturbed, undisturbed / "short.yaml")
    assert slurm_cluster.wait(again).state == "COMPLETED", slurm_cluster.evidence(again)
    assert written(undisturbed) == before


def test_a_job_told_to_stop_goes_on_to_the_same_losses(slurm_cluster: Cluster, tmp_path: Path, undisturbed: Path):
    job = submit(slurm_cluster, tmp_path, short_demo(tmp_path))
    first_checkpoint = tmp_path / "run" / "checkpoints" / "latest"
    slurm_cluster.wait_for(job, lambda _: first_checkpoint.exists())
    slurm_cluster.run("scancel", "--signal=USR1", str(job))
    slurm_cluster.start_now(job)
    end = slurm_cluster.wait(job)
    output = slurm_cluster.output(job)
    assert (end.state, end.restarts) == ("COMPLETED", 1), slurm_cluster.evidence(job)
    assert "stopped during train" in output and "queueing job" in output
    assert losses(tmp_path) == losses(undisturbed)
    check_summary(json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8")))
