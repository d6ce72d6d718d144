"""A user's faults end in one line on the rank that found them, and leave nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from pipeline.errors import FINISHED
from tests.bases import save_stories_with_a_token_more
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, train, write_config

LORA = {"name": "lora", "rank": 4}
FAULTS: dict[int, list[tuple[dict[str, object], str, str]]] = {
    1: [
        ({"base": "none"}, "BaseModelError", "none/config.json"),
        ({"deepspeed": "none.json"}, "ConfigError", "none.json: no such file"),
        ({"data__folder": "none"}, "DataError", "none/english/manifest.json"),
        ({}, "CheckpointError", "make one with scale-cpt upscale"),
        ({"parallel__tp_size": 3}, "LayoutError", "expected a divisor of the number of ranks"),
        ({"data__corpora__korean__token_budget": 320}, "DataError", "use at most 1 steps"),
    ],
    2: [
        ({"schedule__global_batch_size": 9}, "LayoutError", "nearest that do: 8, 12"),
        (
            {
                "parallel": {"tp_size": 2, "sequence_parallel": True},
                "data__sequence_length": 33,
                "method": LORA,
            },
            "LayoutError",
            "data.sequence_length: parallel.sequence_parallel needs a multiple of parallel.tp_size "
            "2, found 33",
        ),
        (
            {"base_precision": "nf4", "zero": 1, "method": LORA, "parallel__tp_size": 2},
            "ConfigError",
            "2 would cut in",
        ),
    ],
}


REFUSED_BY_DEEPSPEED: list[tuple[dict[str, object], str]] = [
    (
        {"zero_optimization": {"stage": 1, "bucket_size": 5}},
        "bucket_size: Extra inputs are not permitted",
    ),
    (
        {"zero_optimization": {"stage": 1, "round_robin": 2}},
        "round_robin: Extra inputs are not permitted",
    ),
    ({"comms_logger": {"prof_ops": 3}}, "prof_ops: Input should be a valid list"),
    ({"data_types": {"keep_in_fp32_modules": 3}}, "keep_in_fp32_modules"),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "Partial offloading",
    ),
]


def test_a_file_that_deepspeed_refuses_ends_in_one_line(tokens, tmp_path):
    """Before a model is built, on the first rank alone."""
    configs = []
    for number, (values, _) in enumerate(REFUSED_BY_DEEPSPEED):
        (file := tmp_path / f"{number}.json").write_text(
            json.dumps({"zero_optimization": {"stage": 1}, **values})
        )
        configs.append(make_run(tmp_path / str(number), tokens, deepspeed=str(file)))
    first, other = run_ranks(in_turn, 2, [partial(train, config) for config in configs])
    for number, (_, message) in enumerate(REFUSED_BY_DEEPSPEED):
        assert str(first[number]).startswith(
            f"ConfigError: {tmp_path / str(number)}.json: DeepSpeed refuses it: "
        )
        assert message in first[number] and "\n" not in first[number]
    assert other == ["exit 2"] * len(configs)


@pytest.mark.parametrize("world_size", FAULTS)
def test_settings_that_do_not_fit(tokens, tmp_path, world_size):
    """Rank 0 raises the error, the others leave with its exit code."""
    faults = FAULTS[world_size]
    configs = []
    for number, (changes, *_) in enumerate(faults):
        configs.append(write_config(tmp_path / str(number), tokens, **changes))
    if world_size == 2:
        larger = str(save_stories_with_a_token_more(tmp_path / "larger"))
        configs.append(write_config(tmp_path / "ids", tokens, base=larger, parallel__tp_size=2))
        faults = [
            *faults,
            ({}, "BaseModelError", "has ids up to 512, but the base's vocab_size is 512"),
        ]
    first, *others = run_ranks(in_turn, world_size, [partial(train, config) for config in configs])
    for (_, error, message), found in zip(faults, first, strict=True):
        assert str(found).startswith(f"{error}: ")
        assert message in found and "\n" not in found
    exits = []
    for _, error, _ in faults:
        # Settings have an exit code of their own; other faults of users have 1.
        exits.append("exit 2" if error == "ConfigError" else "exit 1")
    for rank in others:
        assert rank == exits
    assert not list(tmp_path.glob("*/checkpoints"))
    assert not list(tmp_path.glob("*/training.lock"))


def test_a_run_goes_on_from_its_step_and_scores_the_text_that_it_scored_first(tokens, tmp_path):
    """Less would count as trained to its end; forgetting would be measured on other text."""
    config = make_run(tmp_path, tokens)
    jobs = [
        partial(train, config, changes=["schedule.steps=2"]),
        partial(_train_again, config, changes=["schedule.steps=1"]),
        partial(_train_again, config, changes=["validation.max_sequences=3"]),
        partial(_train_again, config),
    ]
    (finished, shorter, others, again), *_ = run_ranks(in_turn, 1, jobs)
    assert finished == again == FINISHED
    assert shorter.startswith("CheckpointError: ")
    assert "is of step 2, and schedule.steps is 1; set schedule.steps to 2 or more" in shorter
    assert others.startswith("CheckpointError: ")
    assert "scored 5 sequences" in others and "validation.max_sequences is 3" in others


def _train_again(config: Path, changes: Sequence[str] = ()) -> int:
    """Trains a run as if it had not been finished."""
    (config.parent / "training.json").unlink(missing_ok=True)
    return train(config, changes=changes)
