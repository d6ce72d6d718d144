"""`sbatch slurm/cpt_korean.sh` with the real model over two nodes: stopped, queued again, finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from pipeline.hf.load import load_hf_model
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ON_THE_CPU, PROJECT
from tests.studies.smollm2.runs import BOOKS, ENGLISH, KOREAN, LORA
from tests.texts import REVIEWS_HELDOUT
from tests.training.runs import losses

pytestmark = [pytest.mark.slurm, pytest.mark.full]

PATIENCE_S = 1500.0


def test_a_job_that_is_stopped_ends_with_a_model_that_keeps_english(
    smollm2, slurm_cluster: Cluster, tmp_path: Path
):
    korean, english = [str(REVIEWS_HELDOUT)], [str(BOOKS)]
    folder = tmp_path / "run"
    run = {
        "name": "real",
        "folder": str(folder),
        "base": str(smollm2),
        "method": LORA,
        "data": {
            "folder": str(tmp_path / "tokens"),
            "sequence_length": 64,
            "replay_fraction": 0.0,
            "corpora": {
                "korean": {"input": korean, "heldout_input": korean},
                "english": {"input": english, "heldout_input": english, "role": "replay"},
            },
        },
        "gate": {"tokens": 1000},
        "schedule": {
            "steps": 4,
            "global_batch_size": 2,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "validation": {"every_steps": 100, "max_sequences": 2},
        "checkpoints": {"every_steps": 1},
        "deepspeed": "ds_configs/zero1_fp32.json",
    }
    config = tmp_path / "real.yaml"
    config.write_text(yaml.safe_dump(run), encoding="utf-8")
    options = (f"--output={tmp_path}/%j.out", "slurm/cpt_korean.sh", config)
    job = slurm_cluster.sbatch(*options, cwd=PROJECT, **ON_THE_CPU)
    checkpoint = folder / "checkpoints" / "latest"
    slurm_cluster.wait_for(job, lambda _: checkpoint.exists(), timeout=PATIENCE_S)
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
