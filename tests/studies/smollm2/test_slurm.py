"""`sbatch slurm/cpt_korean.sh` with the real model over two nodes: stopped, queued again, finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.hf.load import load_hf_model
from tests.data.helpers import write_jsonl
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_THE_CPU, PROJECT
from tests.studies.smollm2.runs import ENGLISH, KOREAN, LORA, settings_of
from tests.training.runs import losses, write_config

pytestmark = [pytest.mark.slurm, pytest.mark.full]

PATIENCE_S = 1500.0


def test_a_job_that_is_stopped_ends_with_a_model_that_keeps_english(
    smollm2, slurm_cluster: Cluster, tmp_path: Path
):
    folder = tmp_path / "run"
    settings = settings_of(smollm2, LORA, checkpoints={"every_steps": 1}, preflight={})
    # What the stage `evaluate` scores, twice: all that is held out would take it ten minutes.
    for corpus in settings["data__corpora"].values():
        corpus["input"] = corpus["heldout_input"] = [beginning_of(corpus["input"][0], tmp_path)]
    config = write_config(folder, tmp_path / "tokens", name="real.yaml", **settings)
    options = (f"--output={tmp_path}/%j.out", "slurm/cpt_korean.sh", config)
    job = slurm_cluster.sbatch(*options, cwd=PROJECT, **ON_THE_CPU)
    checkpoint = folder / "checkpoints" / "latest"

    def has_saved_or_failed(found: dict[str, str]) -> bool:
        return checkpoint.exists() or found["JobState"] == "FAILED"

    slurm_cluster.wait_for(job, has_saved_or_failed, timeout=PATIENCE_S)
    assert checkpoint.exists(), slurm_cluster.evidence(job)
    slurm_cluster.run("scancel", "--signal=USR1", str(job))
    slurm_cluster.start_now(job)
    end = slurm_cluster.wait(job, PATIENCE_S)
    assert (end.state, end.restarts) == ("COMPLETED", 1), slurm_cluster.evidence(job)
    assert len(losses(folder)) == 4
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["step0_max_abs_logit_difference"] == 0.0
    with torch.no_grad():
        found, base = load_hf_model(folder / "hf"), load_hf_model(smollm2)
        assert torch.equal(found(ENGLISH).logits, base(ENGLISH).logits)
        assert not torch.equal(found(KOREAN).logits, base(KOREAN).logits)


def beginning_of(texts: str, folder: Path) -> str:
    """A file in `folder` with the first documents of a file of texts, at most 8,000 characters of
    each; about 10 KB."""
    documents = good_documents([texts], Keys(), max_bytes=8000)
    path = folder / f"{Path(texts).name.split('.')[0]}.jsonl"
    return str(write_jsonl(path, [document.text[:8000] for document in documents]))
