"""Every ZeRO stage, over data- and tensor-parallel ranks, trains what one process trains: the expansion alone.

Spreading a sum over ranks only reorders it. A sum of n terms in fp32 is then off by about sqrt(n) · 2^-24 of its
largest term: with n = 2^14, a batch's tokens times the hidden size, by 8e-6 (`ROUNDING`). Losses and gradient norms are
such sums. The gradients of queries and keys, which Adam's first moment averages, are what is left of terms that cancel,
some tens of times as large: so is their error, and twice that of their squares. A weight moves by the ratio of
the two, whatever their size, so a few elements whose gradient is all rounding move at random: weights are compared by
the length of what differs against that of the way they went.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.run import load_config
from pipeline.model.decoder import REFERENCE, Decoder
from pipeline.model.from_hf import is_base, open_base
from pipeline.parallel.sharding import full_shape_of, merge
from pipeline.parallel.topology import SINGLE
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.training.runs import in_turn, losses, make_run, metrics, train_and_look

STEPS = 6  # the gains of the first layer only begin to move after three
VARIANTS = {
    "preserve": {"method__variant": "preserve", "method__l_fp": None},
    "adapt": {},
    "route": {"method__variant": "route"},
    "fft": {"method": {"name": "fft"}, "schedule__learning_rate": 1e-4},
    "adapt, rehearsing": {"data__replay_loss": "kl"},
    "fft, rehearsing": {"method": {"name": "fft"}, "schedule__learning_rate": 1e-4, "data__replay_loss": "kl"},
}
ROUNDING = 2**7 * 2**-24
MOMENT_TOLERANCES = {"exp_avg": 40 * ROUNDING, "exp_avg_sq": 80 * ROUNDING}
WEIGHT_TOLERANCE = 0.005
DIAGNOSTICS = ("kl_from_base/", "base_stream_cosine/", "norm_")


# Each pair of settings that could disturb each other is here; rows of one world size share their ranks.
LAYOUTS: dict[str, tuple[int, int, int, bool, str]] = {
    f"ZeRO-{zero}, dp {dp_size}, tp {tp_size}{' sequence-parallel' * sequence_parallel}, {variant}": (
        zero, dp_size, tp_size, sequence_parallel, variant,
    )
    for zero, dp_size, tp_size, sequence_parallel, variant in [
        (1, 2, 1, False, "preserve"),
        (2, 2, 1, False, "adapt"),
        (3, 2, 1, False, "route"),
        (3, 2, 1, False, "fft"),
        (3, 2, 1, False, "adapt, rehearsing"),
        (2, 2, 1, False, "fft, rehearsing"),
        (1, 1, 2, True, "adapt"),
        (2, 1, 2, False, "preserve"),
        (3, 2, 2, True, "preserve"),
        (1, 2, 2, True, "route"),
        # Four ranks share the two new key/value heads.
        (1, 1, 4, False, "preserve"),
        (2, 1, 4, True, "route"),
        (3, 1, 4, True, "adapt"),
        (3, 2, 2, True, "fft, rehearsing"),
    ]
}  # fmt: skip
WORLD_SIZES = {layout: LAYOUTS[layout][1] * LAYOUTS[layout][2] for layout in LAYOUTS}
Runs = dict[str, tuple[Path, list[dict[str, Any]]]]
"""Each run's folder, and what its ranks held at the end."""


def train_all(world_size: int, configs: dict[str, Path]) -> Runs:
    ranks = run_ranks(in_turn, world_size, [partial(train_and_look, config) for config in configs.values()])
    held = zip(*ranks, strict=True)  # by run
    return {name: (config.parent, list(by_rank)) for (name, config), by_rank in zip(configs.items(), held, strict=True)}


@pytest.fixture(scope="module")
def one_process(tokens, tmp_path_factory) -> Runs:
    """Each variant's run on a single rank without sharding; and one of "adapt" that learns fast."""
    folder = tmp_path_factory.mktemp("one_process")
    configs = {
        name: make_run(folder / name, tokens, zero=1, schedule__steps=STEPS, **VARIANTS[name]) for name in VARIANTS
    }
    fast = {"schedule__steps": STEPS, "schedule__learning_rate": 5e-3}
    return train_all(1, {**configs, "fast": make_run(folder / "fast", tokens, zero=1, **fast)})


@pytest.fixture(scope="module")
def sharded(tokens, tmp_path_factory) -> Runs:
    """The run at each layout."""
    folder = tmp_path_factory.mktemp("sharded")
    runs: Runs = {}
    for world_size in sorted(set(WORLD_SIZES.values())):
        configs = {}
        for number, (name, (zero, _, tp_size, sequence_parallel, variant)) in enumerate(LAYOUTS.items()):
            if WORLD_SIZES[name] == world_size:
                parallel = {"tp_size": tp_size, "sequence_parallel": sequence_parallel}
                changes = {"schedule__steps": STEPS, "parallel": parallel, **VARIANTS[variant]}
                configs[name] = make_run(folder / str(number), tokens, zero=zero, **changes)
        runs |= train_all(world_size, configs)
    return runs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sharded_run_equals_one_process(one_process, sharded, layout):
    _, _, tp_size, _, variant = LAYOUTS[layout]
    folder, ranks = sharded[layout]
    reference_folder, [reference] = one_process[variant]
    assert losses(folder) == pytest.approx(losses(reference_folder), rel=ROUNDING)
    rehearsal = ("kl_rehearsal",) if "rehearsing" in variant else ()
    for key in ("gradient_norm", "perplexity/korean", "bits_per_byte/english", *rehearsal):
        expected = [line[key] for line in metrics(reference_folder) if key in line]
        # A divergence is what is left of log probabilities of size ten, however small it is.
        absolute = 10 * ROUNDING if key in rehearsal else 0
        found = [line[key] for line in metrics(folder) if key in line]
        assert found == pytest.approx(expected, rel=ROUNDING, abs=absolute)
        assert any(expected)
    assert diagnostics(folder) == pytest.approx(diagnostics(reference_folder), rel=1e-3)
    assert_same_training(folder, ranks[:tp_size], reference_folder, reference)
    assert_counted(ranks, tp_size, variant, reference)


def diagnostics(run: Path) -> dict[str, float]:
    return {name: value for name, value in metrics(run)[-1].items() if name.startswith(DIAGNOSTICS)}


def assert_same_training(
    run: Path, tp_ranks: list[dict[str, Any]], reference_folder: Path, reference: dict[str, Any]
) -> None:
    """The weights that the model ends with, and the Adam moments that it saved."""
    start = initial_model(run / "run.yaml", "cpu")
    found, expected = (last_checkpoint(folder) for folder in (run, reference_folder))
    assert found.names == expected.names
    for name, parameter in start.named_parameters():
        partition = tp_ranks[0]["partitions"][name]
        shards, size = [rank["parameters"][name] for rank in tp_ranks], full_shape_of(parameter)[partition.dim or 0]
        for holder, shard in enumerate(shards):
            first = holder - holder % partition.replicas(len(shards))
            assert torch.equal(shard, shards[first]), f"{name}: holders of the same shard drifted apart"
        whole, wanted = merge(shards, partition, size), reference["parameters"][name]
        if name not in found.names:
            assert torch.equal(whole, parameter), f"{name} does not train, and changed"
            continue
        way = torch.linalg.vector_norm(wanted - parameter)
        assert way > 0, f"{name} did not train"
        assert torch.linalg.vector_norm(whole - wanted) <= WEIGHT_TOLERANCE * way, name
        for moment, tolerance in MOMENT_TOLERANCES.items():
            wanted = expected.read(name, moment)
            error = (found.read(name, moment) - wanted).abs().max() / wanted.abs().max()
            assert error <= tolerance, f"{moment} of {name}: off by {error:.1e} of the largest"


def assert_counted(ranks: list[dict[str, Any]], tp_size: int, variant: str, reference: dict[str, Any]) -> None:
    """The gate's verdict; and optimizer state of what trains, a shard that several ranks hold once for each."""
    trains_base = variant.startswith("fft")
    parameters = [name for name in reference["parameters"] if not name.startswith(REFERENCE)]
    trained = [name for name in parameters if trains_base or not is_base(name)]
    held = sum(rank["parameters"][name].numel() for rank in ranks[:tp_size] for name in trained)
    for rank in ranks:
        # Full fine-tuning adds nothing whose effect there could be.
        assert rank["step0_max_abs_logit_difference"] == (None if trains_base else 0.0)
        assert rank["trainable_parameters"] == reference["trainable_parameters"]
        assert rank["optimizer_state_elements"] == 2 * held


def last_checkpoint(run: Path) -> CheckpointReader:
    return CheckpointReader(run / "checkpoints" / f"step_{STEPS:08d}", initial_model(run / "run.yaml", "meta"))


def initial_model(config: Path, device: str) -> Decoder:
    """The run's model before its first step; without values on the meta device."""
    from pipeline import methods

    settings, base = load_config(config), open_base(STORIES)
    with torch.device(device):
        model = methods.build_model(settings, base.spec, SINGLE)
    if device != "meta":
        methods.load_initial_weights(model, settings, base, SINGLE)
    return model


def test_losses_fall(one_process):
    folder, _ = one_process["fast"]
    assert len(losses(folder)) == STEPS
    assert losses(folder)[-1] < 0.8 * losses(folder)[0]
