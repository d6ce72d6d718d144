"""A base's architecture as a record: what its config.json means, kept with what was made of the
base.

Two records are compared number by number, not by a hash: the frequencies of a rotary embedding are
computed, and another processor or library may round them otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import orjson

from pipeline.model.spec import DecoderSpec

# Far above what rounding changes in fp32, and far below any change of a setting.
_ROUNDING = 1e-6
# Of a base that transformers computes: a correlation that is measured on a model with random
# weights, whose numbers another release of torch may draw otherwise.
_MEASURED = ".additivity"
_MEASURING_ERROR = 0.1


def architecture_of(spec: DecoderSpec) -> dict[str, Any]:
    """`spec` as JSON, each kind of layer once; without the rows of an extended vocabulary, which
    are a run's own."""
    kinds = list(dict.fromkeys(spec.layers))
    values = spec.to_record()
    values["layer_kinds"] = [asdict(kind) for kind in kinds]
    values["layers"] = [kinds.index(layer) for layer in spec.layers]
    as_json: dict[str, Any] = orjson.loads(orjson.dumps(values))
    return as_json


def changed_entry(
    recorded: Mapping[str, Any] | None, found: Mapping[str, Any] | None
) -> str | None:
    """The first entry of the record `recorded` that has another value in `found`, as text; None if
    none has.

    Nothing is compared where one of them is None, nor are entries that did not exist when it was
    recorded.
    """
    if recorded is None or found is None:
        return None
    return next(_changes("", dict(recorded), dict(found)), None)


def _changes(name: str, recorded: Any, found: Any) -> Iterator[str]:  # JSON
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key, value in recorded.items():
            path = f"{name}.{key}" if name else key
            yield from _changes(path, value, found.get(key))
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for at, (before, now) in enumerate(zip(recorded, found, strict=True)):
            yield from _changes(f"{name}.{at}", before, now)
    elif not _is_same(name, recorded, found):
        yield f"{name} (expected {recorded!r:.80}, found {found!r:.80})"


def _is_same(name: str, recorded: Any, found: Any) -> bool:  # JSON
    if name.endswith(_MEASURED) and isinstance(found, (int, float)):
        return math.isclose(recorded, found, abs_tol=_MEASURING_ERROR)
    if isinstance(recorded, float) and isinstance(found, (int, float)):
        # By relative distance, because rotary frequencies go from 1 down to 1e-6.
        return math.isclose(recorded, found, rel_tol=_ROUNDING)
    return bool(recorded == found)
