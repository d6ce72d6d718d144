"""Asks the checks of a run whether features go together: a small run that has them is made up.

The run is never started, and none of its files exist. Its configuration and DeepSpeed's file are
checked as those of every run are, and its model is built where it takes no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pipeline.checks.inputs import RunInputs
from pipeline.checks.model_fit import check_fits
from pipeline.config.method import Lora, ScaleMethod
from pipeline.config.run import RunConfig, parse_config
from pipeline.conversion.formats import unsupported_reasons
from pipeline.errors import UserError
from pipeline.extensions.compatibility.features import (
    ADAPT,
    BASES,
    DENSE,
    FAMILIES,
    FEATURES,
    METHODS,
    WITHOUT_GATE,
    settings_of,
)
from pipeline.files.json_files import write_json
from pipeline.model.bases import check_dtype, read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import plan_expansion

_RANKS = 4
"""Enough for every layout of the features."""
_NEW_TOKENS = 8
_RUN: Mapping[str, Any] = {
    "name": "combinations",
    "folder": "no_run",
    "base": "no_base",
    "data": {
        "folder": "no_tokens",
        "sequence_length": 32,
        "corpora": {
            "new": {"input": ["new.jsonl"]},
            "old": {"input": ["old.jsonl"], "role": "replay"},
        },
        "replay_fraction": 0.25,
    },
    "schedule": {
        "steps": 6,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
    },
    "checkpoints": {"every_steps": 3},
    "deepspeed": "ds_configs/zero1.json",
}


def refusal(features: Iterable[str]) -> str | None:
    """Why a run with all these features is refused before it reads a text or a weight; None: it is
    not.

    features: names of `FEATURES`, among which no two contradict each other.
    """
    chosen = with_method(features)
    try:
        config = _configuration(chosen)
        deepspeed = RunInputs(config, _RANKS).deepspeed_config
        spec = _spec(chosen)
        check_fits(config, spec)
        check_dtype(spec, deepspeed.dtype)
    except UserError as error:
        return _reason(error)
    return None


def format_refusals(features: Iterable[str]) -> dict[str, str | None]:
    """By format of exports, why it cannot express what a run with these features trained; None
    where it can.

    Raises:
        UserError: there is no such run.
    """
    chosen = with_method(features)
    config = _configuration(chosen)
    spec = _spec(chosen)
    method = config.method
    plan = None
    if isinstance(method, ScaleMethod | Lora):
        open_tokens = None if method.open_rows is None else (1, 2)
        plan = plan_expansion(method, spec.widths, spec.num_layers, open_tokens)
    gated = config.gate is not None and WITHOUT_GATE not in chosen
    return unsupported_reasons(method, plan, spec, gated=gated)


def with_method(features: Iterable[str]) -> list[str]:
    """The features, and Adapt where none of them is a method."""
    chosen = list(features)
    if not any(name in METHODS for name in chosen):
        chosen.insert(0, ADAPT)
    return chosen


def _configuration(features: list[str]) -> RunConfig:
    """The run with these features.

    Raises:
        ConfigError: its configuration is refused.
    """
    values = _copied(_RUN)
    for path, value in settings_of(features).items():
        *parents, last = path.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = _copied(value)
    return parse_config(values, source=_RUN["name"])


def _copied(value: Any) -> Any:
    """The value with sections of its own, which can be added to."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    return value


def _spec(features: list[str]) -> DecoderSpec:
    """The architecture of the base; the rows of new tokens count as part of it."""
    base = DENSE
    for name in features:
        base = FEATURES[name].base or base
    spec = _described(base)
    return replace(spec, new_tokens=_NEW_TOKENS) if "vocabulary" in features else spec


@cache
def _described(base: str) -> DecoderSpec:
    """The architecture of a base of `features.py`, read as that of a user's base is."""
    described = {**BASES, **FAMILIES}[base]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        write_json(file, dict(described.config))
        return read_spec(file, described.code)


def _reason(error: UserError) -> str:
    """What a check says, without the parts that only a user's own file gives a meaning to."""
    reason = re.sub(rf"^{_RUN['name']}: 1 fault\(s\): (the configuration: )?", "", str(error))
    return reason.removesuffix("; docs/configuration.md lists every setting")
