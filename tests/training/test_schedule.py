"""The learning rate over the steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schedule import Schedule
from pipeline.training.learning_rate import learning_rate

KINDS = ("linear", "cosine", "wsd")


def rates(**settings) -> list[float]:
    values = {
        "steps": 100,
        "global_batch_size": 1,
        "micro_batch_size": 1,
        "learning_rate": 1.0,
        **settings,
    }
    schedule = Schedule.model_validate(values)
    return [learning_rate(step, schedule) for step in range(schedule.steps)]


@given(
    st.sampled_from(KINDS), st.integers(1, 300), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)
)
def test_a_schedule_rises_and_then_never_again(kind, steps, warmup, decay, final):
    values = rates(
        decay=kind,
        steps=steps,
        warmup_fraction=warmup,
        decay_fraction=decay,
        final_learning_rate_fraction=final,
    )
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert all(
        after <= before + 1e-12
        for before, after in zip(values[top:], values[top + 1 :], strict=False)
    )
    assert max(values) == pytest.approx(1.0)
    assert min(values) > 0 or final == 0


def test_a_fraction_is_of_whole_steps_whatever_its_product_rounds_to():
    values = rates(steps=100, warmup_fraction=0.07)
    assert values.index(1.0) == 6


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("linear", [0.75, 0.5, 0.1]),
        ("cosine", [0.853553, 0.5, 0.024472]),
        ("wsd", [1.0, 1.0, 0.5]),
    ],
)
def test_warm_up_is_six_percent_and_then_each_shape_falls(kind, shape):
    values = rates(decay=kind, final_learning_rate_fraction=0.1)
    assert values[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert 0.1 < values[-1] < 0.2
    whole = rates(decay=kind, warmup_fraction=0.0, decay_fraction=0.2)
    assert [whole[25], whole[50], whole[90]] == pytest.approx(shape, abs=1e-4)
