"""Searches the longest sequences, and the largest method, with which a first run fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from pipeline.errors import LayoutError
from pipeline.extensions.first_config.fitting import (
    Fit,
    Fitting,
    LayoutSettings,
    layouts,
    needed_memory_gib,
)
from pipeline.model.spec import DecoderSpec
from pipeline.sizing.cluster import GIB, Cluster

ValuesOf: TypeAlias = Callable[[int, dict[str, Any]], dict[str, Any]]
"""Makes the settings of a run from the length of a sequence and the section `method`."""

_SHORTEST = 512
"""Where memory is short, sequences are halved down to this, if they are longer."""
_MOST_GPUS = 4096


def first_that_fits(
    values_of: ValuesOf,
    length: int,
    methods: Sequence[dict[str, Any]],
    spec: DecoderSpec,
    cluster: Cluster,
    dtype: torch.dtype,
) -> Fit:
    """The first run that fits, with sequences of at most `length` tokens.

    Args:
        values_of: makes the settings.
        length: the wanted length of a sequence.
        methods: from the wanted one to the one that takes the least memory.
        spec: the base.
        cluster: the ranks.
        dtype: of the weights.

    Raises:
        LayoutError: nothing fits. It names what would.
    """
    for tried in _groups_of_layouts(spec, cluster, dtype):
        too_large: set[int] = set()
        for number, shorter in _candidates(methods, length):
            if number in too_large:
                continue
            fitting = Fitting(values_of(shorter, methods[number]), spec, cluster, dtype)
            fit = fitting.first(tried)
            if fit is not None:
                return fit
            if fitting.least_fixed_bytes > cluster.recommended_bytes:
                too_large.add(number)  # Shorter sequences do not make it smaller.
    smallest = layouts(spec, cluster, dtype)[-1]
    fitting = Fitting(values_of(_lengths(length)[-1], methods[-1]), spec, cluster, dtype)
    fitting.first([smallest])  # It finds the least memory.
    raise LayoutError(_refusal(fitting, cluster, smallest, methods[-1]))


def _groups_of_layouts(
    spec: DecoderSpec, cluster: Cluster, dtype: torch.dtype
) -> Iterator[list[LayoutSettings]]:
    """The layouts in the order in which lengths and methods are tried for them."""
    found = layouts(spec, cluster, dtype)
    if cluster.on_cpu:
        # Time is short there. Recomputation costs it, and shorter sequences do not.
        yield [layout for layout in found if layout.checkpointing == "none"]
    yield found


def _candidates(methods: Sequence[dict[str, Any]], length: int) -> Iterator[tuple[int, int]]:
    """The numbers of methods and the lengths to try, in order.

    Open rows are given up before length, and length before the rank.
    """
    lengths = _lengths(length)
    most_alike = min(2, len(methods))
    for shorter in lengths:
        for number in range(most_alike):
            yield number, shorter
    for number in range(most_alike, len(methods)):
        for shorter in lengths:
            yield number, shorter


def _lengths(length: int) -> list[int]:
    """The lengths that are tried, the longest first."""
    lengths = [length]
    while lengths[-1] // 2 >= _SHORTEST:
        lengths.append(lengths[-1] // 2)
    return lengths


def _refusal(
    fitting: Fitting, cluster: Cluster, layout: LayoutSettings, method: dict[str, Any]
) -> str:
    """Why nothing fits, and what would."""
    needed = fitting.least_bytes
    found = (
        f"memory: this base does not fit on {cluster.gpus} {cluster.processes} of "
        f"{cluster.gpu_memory_gib:g} GiB: expected {needed / GIB:.3g} GiB a rank, with activation "
        f"checkpointing, a micro-batch of 1, sequences of {fitting.length} tokens and "
        f"{_size_of(method)}, found {cluster.usable_bytes / GIB:.3g} usable"
    )
    would_fit = [f"--gpu-memory-gib {needed_memory_gib(needed, cluster)}"]
    if cluster.on_cpu:
        whole = cluster.gpu_memory_gib * cluster.gpus
        would_fit = [f"a machine of {needed_memory_gib(needed, cluster)} GiB with NPROC=1"]
        if cluster.gpus > 1 and needed_memory_gib(needed, cluster) <= whole:
            would_fit = ["NPROC=1, one process with all memory"]
    gpus = _enough_gpus(fitting, cluster, layout)
    if gpus is not None:
        would_fit.insert(0, f"--gpus {gpus}")
    return f"{found}; it would fit with {' or with '.join(would_fit)}"


def _size_of(method: dict[str, Any]) -> str:
    """The method and its size, for a message."""
    if "rank" in method:
        return f"{method['name']} of rank {method['rank']}"
    return f"method {method['name']}"


def _enough_gpus(fitting: Fitting, cluster: Cluster, layout: LayoutSettings) -> int | None:
    """The number of such GPUs on which ZeRO-3 fits; None where no number is enough."""
    if cluster.on_cpu:
        return None
    gpus = 2 * cluster.gpus
    while gpus <= _MOST_GPUS:
        if fitting.fits_on(gpus, layout._replace(zero_stage=3, compile=False)):
            return gpus
        gpus *= 2
    return None
