"""A step's totals; and results that are not finite: a transient fault changes nothing, a permanent
one one step.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.data.dataset.packing import IGNORED
from pipeline.model.chunked_loss import Losses
from pipeline.training.batches import MicroBatch
from pipeline.training.step_totals import StepSums, StepTotals
from tests.distributed import RankError, run_ranks
from tests.training.faults import Planned, train_with, train_without
from tests.training.runs import in_turn, make_run, metrics, train

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# On two ranks: ZeRO stage, tensor-parallel size, and other DeepSpeed settings.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "ZeRO-1 x tp 2": (1, 2, {}, {}),
    "ZeRO-2, offloaded": (2, 1, {}, OFFLOAD),
    "ZeRO-3, bf16": (3, 1, BF16, {}),
}


def make(folder: Path, tokens: Path, layout: str, **changes: Any) -> Path:
    zero, tp_size, values, sharding = LAYOUTS[layout]
    settings = {
        "parallel__tp_size": tp_size,
        "schedule__steps": 4,
        "schedule__micro_batch_size": 4 if zero == 3 else 2,
    }
    config = make_run(folder, tokens, zero=zero, **settings | changes)
    path = folder / f"zero{zero}.json"
    found = json.loads(path.read_text())
    found |= values
    found["zero_optimization"] |= sharding
    path.write_text(json.dumps(found))
    return config


@pytest.mark.parametrize(
    "layout",
    [
        name if name == "ZeRO-1 x tp 2" else pytest.param(name, marks=pytest.mark.full)
        for name in LAYOUTS
    ],
)
def test_a_transient_fault_changes_nothing_and_a_permanent_one_costs_its_step(
    tokens, tmp_path, layout
):
    """As in a run without faults that skips the step of the permanent one from the start."""
    planned = (Planned("infinite loss", 2, times=1), Planned("nan gradient", 3, times=2))
    faulty = make(tmp_path / "faulty", tokens, layout)
    plain = make(tmp_path / "plain", tokens, layout)
    jobs = [partial(train_with, faulty, *planned), partial(train_without, plain, 3)]
    assert run_ranks(in_turn, 2, jobs) == [[0, None]] * 2
    found = metrics(tmp_path / "faulty")
    assert found[2].pop("recomputed_steps") == 1
    assert found[3] == {"step": 3, "skipped_steps": 1}
    assert found[-1]["step"] > 3 and found[-1]["skipped_steps"] == 1, "so far, on every line"
    assert found == metrics(tmp_path / "plain")


def test_a_resumed_run_remembers_what_it_skipped(tokens, tmp_path):
    config = make(tmp_path / "run", tokens, "ZeRO-1 x tp 2", checkpoints={"every_steps": 3})
    planned = (
        Planned("infinite loss", 2, times=2),
        Planned("nan gradient", 3, times=1),
        Planned("death", 4, times=1),
    )
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 2, config, *planned)
    manifest = json.loads(
        (tmp_path / "run" / "checkpoints" / "step_00000003" / "manifest.json").read_text()
    )
    assert (manifest["position"]["skipped_steps"], manifest["position"]["recomputed_steps"]) == (
        [2],
        1,
    )

    without = make(tmp_path / "without", tokens, "ZeRO-1 x tp 2")
    jobs = [partial(train, config), partial(train_without, without, 2)]
    assert run_ranks(in_turn, 2, jobs) == [[0, None]] * 2
    found = metrics(tmp_path / "run")
    assert found[3].pop("recomputed_steps") == 1
    assert found == metrics(tmp_path / "without")


def totals_of_three_micro_batches(tp_size: int) -> list[StepTotals]:
    """Of a step whose first sequence on rank 0 trains by KL, and of one without any."""
    dp_rank, tp_rank = divmod(dist.get_rank(), tp_size)
    norm = 1.0 + dist.get_rank()
    engine: Any = SimpleNamespace(
        tensor_parallel=SimpleNamespace(rank=tp_rank),
        routed=True,
        gradient_norm=norm,
        step_applied=dist.get_rank() == 0,
    )
    found = []
    for kl_sequences in (int(dp_rank == 0), 0):
        sums = StepSums(torch.device("cpu"))
        nll, kl = torch.full((2, 4), 3.0), torch.zeros(2, 4)
        nll[:kl_sequences], kl[:kl_sequences] = 0.0, 0.5
        targets = torch.ones(2, 4, dtype=torch.long)
        targets[:, -1], nll[:, -1], kl[:, -1] = IGNORED, 0.0, 0.0
        preserved = torch.tensor([[True] * 4, [False] * 4])
        for _ in range(3):
            losses = Losses(nll.sum() + kl.sum(), nll, kl, preserved, None)
            sums.add(losses, MicroBatch(targets, targets, targets, None, kl_sequences=kl_sequences))
        found.append(sums.over_all_ranks(engine, stop=dist.get_rank() == 1))
    return found


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_loss_of_a_step_leaves_tokens_that_train_by_kl_out(tp_size):
    for with_kl, plain in run_ranks(totals_of_three_micro_batches, 2, tp_size):
        assert with_kl == StepTotals(
            3.0, 0.5, preserved_fraction=0.5, stop=True, gradient_norm=1.0, applied=True
        )
        assert plain == with_kl._replace(kl_per_token=None)
        assert with_kl.figures() == {
            "loss": 3.0,
            "gradient_norm": 1.0,
            "kl": 0.5,
            "preserved_fraction": 0.5,
        }
        assert "kl" not in plain.figures()
