"""The DeepSpeed files: those we ship are good, and what cannot work is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schedule import Schedule
from pipeline.deepspeed_config import (
    accumulation_steps,
    load_deepspeed_config,
)
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
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
            2,
            "zero_hpz_partition_size: with",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            1,
            "destroys a base",
        ),
        (
            {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["x"]}}},
            1,
            "leaf_module: with a frozen base",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 100_000}},
            1,
            "granularity_threshold: with a frozen base",
        ),
        (
            {"zero_optimization": {"stage": 1, "round_robin_gradients": True}},
            1,
            "round_robin_gradients: checkpoints would hold",
        ),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            1,
            "bf16_optimizer_states: checkpoints hold",
        ),
        (
            {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            1,
            "offload_optimizer: with data_types.grad_accum_dtype fp32 under ZeRO-2",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, values, tp_size, message):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, **values}))
    with pytest.raises(ConfigError) as error:
        load_deepspeed_config(path, Layout(4, tp_size))
    assert (
        message in str(error.value)
        and str(path) in str(error.value)
        and "\n" not in str(error.value)
    )
    if tp_size > 1:  # hpZ by itself works
        assert load_deepspeed_config(path, Layout(4)).zero_stage == 3


WRONG_TYPES = [
    ({"zero_optimization": {"stage": True}}, "stage: expected 1, 2 or 3, found True"),
    ({"zero_optimization": {"stage": "2"}}, "stage: expected 1, 2 or 3, found '2'"),
    (
        {"zero_optimization": {"stage": 1, "overlap_comm": "false"}},
        "overlap_comm: expected true or false",
    ),
    (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": "5e8"}},
        "reduce_bucket_size: expected a whole number",
    ),
    (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": None}},
        "reduce_bucket_size: expected a whole number",
    ),
    (
        {"zero_optimization": {"stage": 1, "reduce_bucket_size": 0.5}},
        "reduce_bucket_size: expected a whole number",
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": [1]}},
        "parameters: expected a whole number",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": "cpu"}},
        "offload_optimizer: expected an object",
    ),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpu"}}},
        "device: expected one of none, cpu",
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "2"}},
        "size: expected a whole number, found '2'",
    ),
    ({"bf16": True}, "bf16: expected an object"),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled: expected true or false"),
    ({"data_types": "fp32"}, "data_types: expected an object"),
    ({"data_types": {"grad_accum_dtype": ["fp32"]}}, "grad_accum_dtype: expected one of fp32"),
    (
        {"communication_data_type": 16},
        "communication_data_type: expected one of fp32, fp16, bf16, found 16",
    ),
    ({"communication_data_type": "float32"}, "communication_data_type: expected one of"),
    ({"aio": 1}, "aio: expected an object"),
    ({"comms_logger": True}, "comms_logger: expected an object"),
    ({"steps_per_print": "never"}, "steps_per_print: expected a whole number"),
    ({"gradient_predivide_factor": "2"}, "gradient_predivide_factor: expected a number above 0"),
]


@pytest.mark.parametrize(
    ("values", "message"), WRONG_TYPES, ids=[str(values) for values, _ in WRONG_TYPES]
)
def test_values_of_a_wrong_type_are_refused_by_name(tmp_path, values, message):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, **values}))
    with pytest.raises(ConfigError) as error:
        load_deepspeed_config(path, Layout(4))
    assert (
        message in str(error.value)
        and str(path) in str(error.value)
        and "\n" not in str(error.value)
    )


@pytest.mark.parametrize(
    "setting", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}]
)
def test_another_average_of_gradients_is_refused_where_deepspeed_cannot_make_it(tmp_path, setting):
    path = tmp_path / "deepspeed.json"
    for stage in (1, 2, 3):
        path.write_text(
            json.dumps(
                {"zero_optimization": {"stage": stage, "reduce_bucket_size": 5e8}, **setting}
            )
        )
        if stage == 1:
            assert (
                load_deepspeed_config(path, Layout(4)).elements("reduce_bucket_size") == 500_000_000
            )
            continue
        with pytest.raises(
            ConfigError, match=f"{next(iter(setting))}: expected .* under ZeRO-{stage}"
        ):
            load_deepspeed_config(path, Layout(4))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "not JSON"), ("[]", "expected a JSON object")],
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
        steps = accumulation_steps(
            schedule(global_batch_size=batch, micro_batch_size=micro), dp_size
        )
    except LayoutError as error:
        sizes, _, smaller = str(error).rsplit(": ", 1)[1].partition("; or set micro_batch_size to ")
        nearest = [int(size) for size in sizes.split(", ")]
        assert batch % (micro * dp_size)
        assert bool(smaller) == (batch % dp_size == 0)
        if smaller:
            assert int(smaller) < micro and batch % (int(smaller) * dp_size) == 0
        assert all(
            size % (micro * dp_size) == 0 and abs(size - batch) < micro * dp_size
            for size in nearest
        )
    else:
        assert steps * micro * dp_size == batch
