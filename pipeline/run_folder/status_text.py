"""A run's status for a person: a few aligned lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from pipeline.run_folder.status import RunStatus


def as_text(status: RunStatus) -> str:
    """One fact a line; what is not known is left out."""
    facts = {
        "run": status.folder,
        "state": f"{status.state}: {status.why}",
        "step": f"{status.step:,} of {status.steps:,} ({status.step / status.steps:.1%})" if status.steps else None,
        "tokens": f"{status.tokens_seen:,}" if status.tokens_seen is not None else None,
        "loss": f"{status.loss:.4f}" if status.loss is not None else None,
        "speed": f"{status.tokens_per_second:,.0f} tokens/s" if status.tokens_per_second else None,
        "restarts": f"{status.restarts} so far",
        "skipped": f"{status.skipped_steps} step(s)" if status.skipped_steps else None,
        "checkpoint": _checkpoint(status),
        "end": _end(status),
    }
    said = {name: text for name, text in facts.items() if text is not None}
    width = max(map(len, said))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in said.items())


def as_lines(statuses: Sequence[RunStatus]) -> str:
    """One run a line: its folder's name, state, steps, and why."""
    rows = [
        (Path(one.folder).name, one.state, f"{one.step:,} of {one.steps:,}" if one.steps else "", one.why)
        for one in statuses
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _checkpoint(status: RunStatus) -> str | None:
    if status.checkpoint is None or status.checkpoint_age_s is None:
        return "none yet"
    return f"{status.checkpoint}, {_duration(status.checkpoint_age_s)} old"


def _end(status: RunStatus) -> str | None:
    if status.seconds_left is None:
        return None
    if status.expected_end is None:
        return f"after {_duration(status.seconds_left)} of training from the newest checkpoint"
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.expected_end))
    return f"in {_duration(status.seconds_left)}, on {moment}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
