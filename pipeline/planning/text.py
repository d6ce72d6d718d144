"""The plan, as lines for a person and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from typing import Any

from pipeline.estimation.cluster import GIB
from pipeline.estimation.memory import Memory
from pipeline.planning.plan import Plan

_UNKNOWN = "unknown: see what would stop it"


def as_values(plan: Plan, now: datetime) -> dict[str, Any]:
    """The plan as JSON values: bytes, seconds, tokens; and when it would end if it started `now`."""
    values = asdict(plan)
    values["tokens"] = plan.steps * plan.tokens_per_step
    if plan.estimate is not None:
        values["estimate"]["memory"]["total"] = plan.estimate.memory.total
        values["estimate"]["fits"] = plan.estimate.fits(plan.cluster)
    if plan.choice is not None:
        values["choice"] = plan.choice._asdict()
    values["ends_at"] = end_of(plan, now).isoformat(timespec="minutes") if plan.duration else None
    values["could_start"] = not plan.faults
    return values


def end_of(plan: Plan, now: datetime) -> datetime:
    """When the last step would be done."""
    assert plan.duration is not None
    return now + timedelta(seconds=round(plan.duration.left_s))


def as_text(plan: Plan, now: datetime) -> str:
    """The plan as a few dozen lines, what would stop it at the end."""
    rows = [("run", f"{plan.name}, in {plan.folder}")]
    rows += [("layout", _layout(plan)), ("parameters", _parameters(plan)), *_memory(plan)]
    rows += [("batch", f"{plan.tokens_per_step:,} tokens a step, {plan.micro_batches or '?'} micro-batches a rank")]
    rows += [("steps", f"{plan.steps:,}, {plan.steps * plan.tokens_per_step:,} tokens in all")]
    rows += [(f"corpus {one.name}", text) for one, text in zip(plan.corpora, _corpora(plan), strict=True)]
    rows += [
        ("learning rate", f"{point.learning_rate:.3g} from step {point.step:,}: {point.what}")
        for point in plan.learning_rates
    ]
    rows += [("checkpoints", line) for line in _checkpoints(plan)]
    rows += [("validation", _validation(plan)), ("duration", _duration(plan, now))]
    rows += [("yet to make", line) for line in plan.to_make]
    rows += [("would stop it", line) for line in plan.faults or ("nothing that can be seen from here",)]
    return "\n".join(_table(rows))


def _table(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = max(len(name) for name, _ in rows)
    before = ""
    for name, text in rows:
        yield f"{'' if name == before else name:<{width}}  {text}"
        before = name


def _layout(plan: Plan) -> str:
    nodes = -(-plan.cluster.gpus // plan.cluster.gpus_per_node)
    gpus = f"{plan.cluster.gpus} GPUs on {nodes} node(s)"
    return gpus if plan.choice is None else f"{gpus}: dp {plan.dp_size}, {plan.choice}"


def _parameters(plan: Plan) -> str:
    if plan.parameters is None:
        return _UNKNOWN
    counts = plan.parameters
    share = counts.trained / counts.total
    return f"base {counts.base:,}, expansion {counts.expansion:,}, trained {counts.trained:,} ({share:.1%})"


def _memory(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.estimate is None:
        yield "memory a GPU", _UNKNOWN
        return
    memory = plan.estimate.memory
    kinds = ", ".join(f"{kind.name} {getattr(memory, kind.name) / GIB:.2f}" for kind in fields(Memory))
    yield "memory a GPU", f"{memory.total / GIB:.2f} of {plan.cluster.usable_bytes / GIB:.0f} usable GiB: {kinds}"
    if plan.estimate.host_bytes:
        yield "memory a GPU", f"{plan.estimate.host_bytes / GIB:.2f} GiB in its host's memory"


def _corpora(plan: Plan) -> Iterator[str]:
    for corpus in plan.corpora:
        if corpus.tokens is None:
            yield f"{corpus.role}, not tokenized yet: how often it will be read is not known"
        elif corpus.epochs is None:
            yield f"{corpus.role}, {corpus.tokens:,} tokens, not drawn from"
        else:
            yield f"{corpus.role}, {corpus.tokens:,} tokens, {corpus.epochs:.3g} epochs"


def _checkpoints(plan: Plan) -> Iterator[str]:
    checkpoints = plan.checkpoints
    if checkpoints is None:
        yield _UNKNOWN
        return
    size, most = checkpoints.bytes_each / 1e9, checkpoints.most_at_once
    yield f"{checkpoints.written:,} of {size:.3g} GB each, at most {most} at once"
    yield f"{checkpoints.needed_bytes / 1e9:.3g} GB more needed, {checkpoints.free_bytes / 1e9:.3g} GB free"


def _validation(plan: Plan) -> str:
    read = [f"{one.validation_sequences} of {one.name}" for one in plan.corpora if one.validation_sequences is not None]
    return f"{plan.validations:,} times" + (f", sequences: {', '.join(read)}" if read else "")


def _duration(plan: Plan, now: datetime) -> str:
    if plan.duration is None:
        return _UNKNOWN
    duration = plan.duration
    left = f"{plan.steps - duration.steps_done:,} steps of {duration.step_s:.3g} s"
    end = end_of(plan, now).strftime("%Y-%m-%d %H:%M")
    return f"{timedelta(seconds=round(duration.left_s))} for {left}, until {end} if it starts now ({duration.source})"
