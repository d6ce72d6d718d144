"""The layout and the micro-batch with which a first configuration fits on its cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from pipeline.config.run import RunConfig, parse_config
from pipeline.config.sources import merged
from pipeline.config.stage_plan import training_stages
from pipeline.deepspeed_config import DeepSpeedConfig, load_deepspeed_config
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.causal_decoder import ActivationCheckpointing
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import GIB, Cluster
from pipeline.sizing.memory import Memory, estimate_memory
from pipeline.sizing.meta_device import NotTracedError
from pipeline.sizing.micro_batch import MicroBatchCosts, measure_micro_batch

_MICRO_BATCHES = (16, 8, 4, 2, 1)
"""Sizes that are tried, the largest first: larger matrix products reach more of a GPU's peak."""
_CPU_TOKENS = 2048
"""On CPUs a micro-batch of more tokens is not faster."""


class LayoutSettings(NamedTuple):
    """The settings of a layout that a first configuration may have."""

    zero_stage: int
    checkpointing: ActivationCheckpointing = "none"
    keeps: KeptResults = "nothing"
    compile: bool = False

    def values(self, dtype: torch.dtype) -> dict[str, Any]:
        """The settings, as in a run's file."""
        settings: dict[str, Any] = {"deepspeed": deepspeed_file(self.zero_stage, dtype)}
        if self.checkpointing != "none":
            settings["activation_checkpointing"] = self.checkpointing
        if self.keeps != "nothing":
            settings["recomputation_keeps"] = self.keeps
        if self.compile:
            settings["compile"] = True
        return settings


def deepspeed_file(zero_stage: int, dtype: torch.dtype) -> str:
    """DeepSpeed's file for a ZeRO stage, with weights of `dtype`."""
    precision = "_fp32" if dtype == torch.float32 else ""
    return f"ds_configs/zero{zero_stage}{precision}.json"


def layouts(spec: DecoderSpec, cluster: Cluster, dtype: torch.dtype) -> list[LayoutSettings]:
    """Layouts, from the least communication to the least memory.

    Recomputation comes last, since it costs time: a fifth with products kept, half without. Layers
    of dense bases are compiled on GPUs, but not under ZeRO-3, which excludes it. On CPUs compiling
    takes longer than a short run gains.
    """
    found = [LayoutSettings(1)]
    stage = 1
    if not cluster.on_cpu and cluster.gpus > 1:
        if dtype != torch.float32:
            found.append(LayoutSettings(2))  # There is no file of it in fp32.
        stage = 3
        found.append(LayoutSettings(stage))
    if spec.is_native:
        found.append(LayoutSettings(stage, "all", "products"))
    found.append(LayoutSettings(stage, "all"))
    compiles = not cluster.on_cpu and spec.is_native and spec.mixture is None
    return [layout._replace(compile=compiles and layout.zero_stage < 3) for layout in found]


class Fit(NamedTuple):
    """A run that fits, and its settings without defaults."""

    config: RunConfig
    values: dict[str, Any]


class Fitting:
    """Searches the layout and the micro-batch of one run.

    Attributes:
        least_bytes: the least memory of a rank that was found.
        least_fixed_bytes: likewise without what a micro-batch takes.
    """

    def __init__(
        self, values: Mapping[str, Any], spec: DecoderSpec, cluster: Cluster, dtype: torch.dtype
    ) -> None:
        self._values = dict(values)
        self._spec = spec
        self._cluster = cluster
        self._dtype = dtype
        self.least_bytes = float("inf")
        self.least_fixed_bytes = float("inf")
        # A micro-batch takes most of a second to measure, and ZeRO's stages share it.
        self._costs = cache(self._measure)

    @property
    def length(self) -> int:
        """The tokens of a sequence."""
        return int(self._values["data"]["sequence_length"])

    def fits_on(self, gpus: int, layout: LayoutSettings) -> bool:
        """Whether a layout would fit, with a micro-batch of 1, on another number of such GPUs."""
        config = self._fit(layout, 1).config
        zero = load_deepspeed_config(config.deepspeed, Layout(gpus, 1, 1))
        most = 0
        for number in range(len(training_stages(config))):
            costs = self._costs(layout.checkpointing, layout.keeps, 1, number)
            memory, _ = estimate_memory(costs, zero, gpus)
            most = max(most, memory.total)
        return most <= self._cluster.recommended_bytes

    def first(self, tried: list[LayoutSettings]) -> Fit | None:
        """The first layout that fits, with its largest micro-batch; None where none does."""
        try:
            # The last one takes the least memory: where it does not fit, none does.
            if not self._fits(tried[-1], 1):
                return None
            for layout in tried:
                size = self._largest_micro_batch(layout)
                if size is not None:
                    return self._fit(layout, size)
        except NotTracedError:
            # No memory can be estimated, which the dry run reports. The first layout is taken, with
            # the smallest micro-batch, which is likeliest to fit.
            return self._fit(tried[0], 1)
        return None

    def _largest_micro_batch(self, layout: LayoutSettings) -> int | None:
        """The largest size that fits; None where none does."""
        if not self._fits(layout, 1):
            return None
        sizes = [size for size in self._sizes() if size > 1]
        if not sizes:
            return 1
        one, two = self._bytes(layout, 1), self._bytes(layout, sizes[-1])
        each = (two - one) / (sizes[-1] - 1)
        for size in sizes:
            # Memory is about linear in the size, so that most sizes need not be measured.
            expected = one + (size - 1) * each
            if expected <= 1.02 * self._cluster.recommended_bytes and self._fits(layout, size):
                return size
        return 1

    def _sizes(self) -> Iterator[int]:
        """The micro-batches that divide a rank's share of the batch, the largest first."""
        per_rank = self._values["schedule"]["global_batch_size"] // self._cluster.gpus
        for size in _MICRO_BATCHES:
            too_large = self._cluster.on_cpu and size > 1 and size * self.length > _CPU_TOKENS
            if per_rank % size == 0 and not too_large:
                yield size

    def _fits(self, layout: LayoutSettings, micro_batch: int) -> bool:
        return self._bytes(layout, micro_batch) <= self._cluster.recommended_bytes

    def _bytes(self, layout: LayoutSettings, micro_batch: int) -> float:
        """The memory of a rank; on CPUs with what it holds beside."""
        config = self._fit(layout, micro_batch).config
        zero = load_deepspeed_config(config.deepspeed, Layout(self._cluster.gpus, 1, 1))
        most = 0.0
        for number in range(len(training_stages(config))):
            costs = self._costs(layout.checkpointing, layout.keeps, micro_batch, number)
            memory, on_host = self._memory(costs, zero, config)
            total = float(memory.total)
            if self._cluster.on_cpu:
                total += on_host
            passing = memory.activations + memory.loss + memory.temporary
            self.least_fixed_bytes = min(self.least_fixed_bytes, total - passing)
            most = max(most, total)
        self.least_bytes = min(self.least_bytes, most)
        return most

    def _memory(
        self, costs: MicroBatchCosts, zero: DeepSpeedConfig, config: RunConfig
    ) -> tuple[Memory, int]:
        return estimate_memory(
            costs, zero, self._cluster.gpus, asynchronous=config.checkpoints.asynchronous
        )

    def _measure(
        self,
        checkpointing: ActivationCheckpointing,
        keeps: KeptResults,
        micro_batch: int,
        stage: int,
    ) -> MicroBatchCosts:
        config = self._fit(LayoutSettings(1), micro_batch).config
        of_stage = training_stages(config)[stage].config
        spec = extended_spec(config, self._spec)
        return measure_micro_batch(of_stage, spec, 1, checkpointing, self._dtype, keeps)

    def _fit(self, layout: LayoutSettings, micro_batch: int) -> Fit:
        settings = {**layout.values(self._dtype), "schedule": {"micro_batch_size": micro_batch}}
        fitted = merged(self._values, settings)
        return Fit(parse_config(fitted, source="the proposed configuration"), fitted)


def needed_memory_gib(needed_bytes: float, cluster: Cluster) -> int:
    """The memory of a GPU with which a run of so many bytes is recommended, in whole GiB."""
    share = cluster.recommended_bytes / (cluster.gpu_memory_gib * GIB)
    return math.ceil(needed_bytes / share / GIB)
