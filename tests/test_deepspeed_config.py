"""The DeepSpeed files: those we ship are good, and what cannot work is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schedule import Schedule
from pipeline.deepspeed_config import accumulation_steps, load_deepspeed_config
from pipeline.errors import ConfigError, LayoutError
from pipeline.parallel.topology import Layout

SHIPPED = sorted((Path(__file__).parents[1] / "ds_configs").glob("*.json"))


def schedule(**changes: int) -> Schedule:
    values = {"steps": 10, "global_batch_size": 16, "micro_batch_size": 2, "learning_rate": 1e-3}
    return Schedule.model_validate({**values, **changes})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_accepted(path):
    loaded = load_deepspeed_config(path, Layout(4, 2))
    merged = loaded.merged(schedule(), Layout(4, 2))
    assert merged["gradient_accumulation_steps"] == 4
    assert merged["zero_optimization"]["stage"] == loaded.zero_stage
    assert loaded.dtype == (torch.float32 if "fp32" in path.stem else torch.bfloat16)


@pytest.mark.parametrize(
    ("values", "tp_size", "message"),
    [
        ({"train_batch_size": 8}, 1, "train_batch_size: remove it, the run configuration sets it"),
        ({"optimizer": {"type": "Adam"}}, 1, "optimizer: remove it"),
        ({"bf16": {"enabled": "auto"}}, 1, 'bf16.enabled: "auto" means nothing here'),
        ({"fp16": {"enabled": True}}, 1, "fp16: not among"),
        ({"zero_optimization": {"stage": 0}}, 1, "stage: expected 1, 2 or 3, found 0"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, 2, "zero_hpz_partition_size: with"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, 1, "destroys a base"),
        ({"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["x"]}}}, 1, "leaf_module: with a frozen base"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, values, tp_size, message):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **values}))
    with pytest.raises(ConfigError) as error:
        load_deepspeed_config(path, Layout(4, tp_size))
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
    if tp_size > 1:  # hpZ by itself works
        assert load_deepspeed_config(path, Layout(4)).zero_stage == 3


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("{", "not JSON"), ("[]", "expected a JSON object")]
)
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "deepspeed.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_deepspeed_config(path, Layout(1))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16))
def test_accumulation_makes_the_global_batch_or_names_sizes_that_do(batch, micro, dp_size):
    try:
        steps = accumulation_steps(schedule(global_batch_size=batch, micro_batch_size=micro), dp_size)
    except LayoutError as error:
        nearest = [int(size) for size in str(error).rsplit(": ", 1)[1].split(", ")]
        assert batch % (micro * dp_size)
        assert all(size % (micro * dp_size) == 0 and abs(size - batch) < micro * dp_size for size in nearest)
    else:
        assert steps * micro * dp_size == batch
