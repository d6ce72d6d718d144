"""A gate that opens on more old text than asked is named, with what it costs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pipeline.gating.folder import GateRecord, HeldoutText
from pipeline.gating.open_old_text import warn_of_open_old_text


def heldout(role: str, open_fraction: float, **changes: Any) -> HeldoutText:
    values: dict[str, Any] = {
        "role": role,
        "sequences": 64,
        "tokens": 16_384,
        "open_fraction": open_fraction,
        "closed_sequences": 41,
        "base_perplexity": 10.0,
        "ungated_perplexity": 30.0,
        "gated_perplexity": 11.45,
    }
    return HeldoutText(**values | changes)


def record_of(**texts: HeldoutText) -> GateRecord:
    return GateRecord(
        request={},
        layer=2,
        features="token",
        bias=0.0,
        threshold=1.0,
        auc=0.99,
        closed_fraction_of_new=0.02,
        open_fraction_of_negatives=0.001,
        left_out_of_own_text=0.0,
        heldout=texts,
        closed_max_abs_logit_difference=0.0,
    )


def warnings_of(caplog: pytest.LogCaptureFixture, record: GateRecord) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pipeline"):
        warn_of_open_old_text(record, 0.001)
    return [one.getMessage() for one in caplog.records]


@pytest.mark.parametrize("role", ["replay", "self_generated"])
def test_old_text_that_opens_is_named_with_its_cost(caplog, role: str):
    (warning,) = warnings_of(caplog, record_of(new=heldout("new", 0.93), old=heldout(role, 0.058)))
    assert warning.startswith(
        f"old ({role}): the gate opens on 5.80 % of it, and gate.max_open_fraction asks for 0.1 %; "
        "its perplexity is +14.5% from the base's; 41 of 64 held-out samples keep every logit of "
    )
    unknown = {"base_perplexity": None, "gated_perplexity": None}
    (warning,) = warnings_of(caplog, record_of(old=heldout(role, 0.058, **unknown)))
    assert "asks for 0.1 %; 41 of 64" in warning
    overflown = {"gated_perplexity": None}
    (warning,) = warnings_of(caplog, record_of(old=heldout(role, 0.058, **overflown)))
    assert "+inf%" in warning


def test_a_gate_as_it_was_asked_for_is_not(caplog):
    """Nor one that is a little beyond on a small sample."""
    record = record_of(new=heldout("new", 1.0), old=heldout("replay", 0.002))
    assert warnings_of(caplog, record) == []
