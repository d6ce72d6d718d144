"""Groups of trained parameters: each with a factor of the learning rate and a weight decay of its
own.

A setting names the parameters of a group by the kind of block, such as `expansion_to_base`, or by a
pattern of names, such as `layers.0.*`. Where several keys match a parameter, the last one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from torch import nn

from pipeline.config.schedule import Schedule
from pipeline.errors import ConfigError, did_you_mean
from pipeline.optimizers.adamw import ADAMW
from pipeline.optimizers.optimizer import optimizer_named
from pipeline.parallel.parameters import full_shape_of, named_trained_parameters

_PARTS_OF_A_MAP = (
    "expansion_to_base",
    "base_to_expansion",
    "expansion_to_expansion",
    "adapter",
    "router",
)
KINDS = (
    "embedding",
    "output",
    "new_tokens",
    "open_rows",
    "open_gains",
    "norm",
    *_PARTS_OF_A_MAP,
    "base",
)
"""The kinds of blocks that a setting may name; `base` is every other parameter of the base's own.
"""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters, by name, that the optimizer treats alike.

    Attributes:
        learning_rate_factor: what the schedule's learning rate is multiplied by.
        weight_decay: AdamW's decoupled decay; 0 for vectors.
        optimizer: the name of the one that updates them.
    """

    names: tuple[str, ...]
    learning_rate_factor: float
    weight_decay: float
    optimizer: str


@dataclass(frozen=True)
class GroupRow:
    """A row of the table of groups, which the dry run and `config show` print.

    Attributes:
        stage: the stage of the run; None for a run without stages.
        key: a kind of block, or the pattern of names that decides.
        tensors, parameters: how many train; parameters are counted whole, over all ranks.
        learning_rate: at the schedule's peak, with the group's factor.
        weight_decay: AdamW's decoupled decay; 0 for vectors.
        optimizer: the name of the one that updates them.
    """

    stage: str | None
    key: str
    tensors: int
    parameters: int
    learning_rate: float
    weight_decay: float
    optimizer: str


def block_kind(name: str) -> str:
    """The kind of block, one of `KINDS`, of the parameter `name`."""
    parts = name.split(".")
    if "new_rows" in parts:
        return "new_tokens"
    if parts[0] == "own_input" or parts[-1] == "own_rows":
        return "open_rows"
    if "own" in parts:
        return "open_gains"
    if parts[0] in ("embedding", "output"):
        return parts[0]
    if any(part.endswith("_norm") for part in parts):
        return "norm"
    for part in parts:
        if part in _PARTS_OF_A_MAP:
            return part
    return "base"


def factors_by_name(
    names: Iterable[str], factors: Mapping[str, float], *, setting: str
) -> dict[str, float]:
    """The factor of each parameter: 1, or that of the last key of `factors` that matches its name.

    Raises:
        ConfigError: a key of `factors` matches no trained parameter; `setting` names the setting.
    """
    found = dict.fromkeys(names, 1.0)
    for key, factor in factors.items():
        for name in matching(key, found, setting=f"schedule.{setting}"):
            found[name] = factor
    return found


def matching(key: str, names: Collection[str], *, setting: str) -> list[str]:
    """The names of trained parameters that `key` matches, a kind of block or a pattern.

    Raises:
        ConfigError: it matches none of them; `setting` names the setting.
    """
    matched = [name for name in names if matches(key, name)]
    if not matched:
        trained_kinds = sorted({block_kind(name) for name in names})
        raise ConfigError(
            f"{setting}: {key!r} matches no parameter that trains"
            f"{did_you_mean(key, trained_kinds)}; expected one of {', '.join(trained_kinds)}, or a "
            f"pattern of names such as {_example_pattern(names)!r}"
        )
    return matched


def matches(key: str, name: str) -> bool:
    """Whether `key`, a kind of block or a pattern of names, matches the parameter `name`."""
    if key in KINDS:
        return block_kind(name) == key
    # Not `fnmatch`, whose case depends on the operating system.
    return fnmatchcase(name, key)


def _example_pattern(names: Collection[str]) -> str:
    """A pattern that matches some of the names."""
    first = next(iter(names), "layers.0.norm")
    return first.rsplit(".", 1)[0] + ".*"


def stages_of(name: str, trains: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """The stages, counted from 0, in which a parameter that the method trains does train.

    `trains` is the setting of that name of each stage; an empty one means everything.
    """
    numbers: list[int] = []
    for number, keys in enumerate(trains):
        if not keys or any(matches(key, name) for key in keys):
            numbers.append(number)
    return tuple(numbers)


def trained_groups(
    model: nn.Module,
    schedule: Schedule,
    *,
    frozen_in_stage: Iterable[str] = (),
    trained_before: Sequence[Sequence[str]] = (),
) -> list[ParameterGroup]:
    """The groups of the parameters that train, those of AdamW last; within a group the model's
    order.

    Vectors (gains, biases) do not decay, whatever `weight_decay_factors` say. Shapes are the full
    ones, because ZeRO-3's partitions are flat. AdamW counts the steps of a group as one, for the
    correction of its moments' bias: parameters that have trained for other numbers of steps are in
    groups of their own.

    Args:
        model: whose parameters train.
        schedule: the optimizer, and the factors of rates and decays.
        frozen_in_stage: the names of those that the method trains, and this stage does not. A
            factor may name them too.
        trained_before: the setting `trains` of each earlier stage.

    Raises:
        ConfigError: a key of `learning_rate_factors` or `weight_decay_factors` matches nothing.
    """
    trained = dict(named_trained_parameters(model))
    chosen = optimizer_named(schedule.optimizer)
    names = [*trained, *frozen_in_stage]
    rates = factors_by_name(names, schedule.learning_rate_factors, setting="learning_rate_factors")
    decays = factors_by_name(names, schedule.weight_decay_factors, setting="weight_decay_factors")
    members: dict[tuple[str, float, float, tuple[int, ...]], list[str]] = {}
    for name, parameter in trained.items():
        optimizer = chosen if chosen.updates(name, parameter) else ADAMW
        # As is usual since GPT-2: decay would pull gains, which start at 1, to 0.
        is_vector = len(full_shape_of(parameter)) <= 1
        decay = 0.0 if is_vector else schedule.weight_decay * decays[name]
        before = stages_of(name, trained_before)
        members.setdefault((optimizer.name, rates[name], decay, before), []).append(name)
    groups = [
        ParameterGroup(tuple(names), rate, decay, optimizer)
        for (optimizer, rate, decay, _), names in members.items()
    ]
    # The order of groups is part of ZeRO's flat tensors; it is the same on every rank, since it
    # follows from names alone. `sorted` is stable.
    return sorted(groups, key=lambda group: group.optimizer == ADAMW.name)


def group_rows(
    model: nn.Module,
    schedule: Schedule,
    *,
    stage: str | None = None,
    frozen_in_stage: Iterable[str] = (),
) -> list[GroupRow]:
    """The table of groups: a row for each kind, or pattern, with a rate and a decay of its own.

    Args:
        model: whose parameters train.
        schedule: of the run, or of one of its stages.
        stage: the name of that stage.
        frozen_in_stage: the names of those that the method trains, and that stage does not.

    Raises:
        ConfigError: a factor of the schedule is for parameters that are not there.
    """
    trained = dict(named_trained_parameters(model))
    patterns = [*schedule.learning_rate_factors, *schedule.weight_decay_factors]
    rows: dict[tuple[str, float, float, str], list[str]] = {}
    for group in trained_groups(model, schedule, frozen_in_stage=frozen_in_stage):
        rate = schedule.learning_rate * group.learning_rate_factor
        for name in group.names:
            key = _deciding_key(name, patterns)
            rows.setdefault((key, rate, group.weight_decay, group.optimizer), []).append(name)

    table: list[GroupRow] = []
    for (key, rate, decay, optimizer), names in rows.items():
        parameters = sum(prod(full_shape_of(trained[name])) for name in names)
        table.append(GroupRow(stage, key, len(names), parameters, rate, decay, optimizer))
    return table


def _deciding_key(name: str, keys: Sequence[str]) -> str:
    """The last of the keys that matches the parameter, or its kind."""
    deciding = block_kind(name)
    for key in keys:
        if matches(key, name):
            deciding = key
    return deciding


def group_lines(rows: Sequence[GroupRow]) -> list[str]:
    """The table of groups as aligned lines of text, with a head."""
    cells = [("group", "tensors", "parameters", "peak rate", "decay", "optimizer")]
    for row in rows:
        cells.append(
            (
                row.key if row.stage is None else f"{row.stage}: {row.key}",
                f"{row.tensors:,}",
                f"{row.parameters:,}",
                f"{row.learning_rate:.3g}",
                f"{row.weight_decay:.3g}",
                row.optimizer,
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[str] = []
    for key, *others in cells:
        aligned = [key.ljust(widths[0])]
        for text, width in zip(others, widths[1:], strict=True):
            aligned.append(text.rjust(width))
        lines.append("  ".join(aligned))
    return lines
