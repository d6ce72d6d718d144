"""The estimate of a run on one layout, and on every layout worth comparing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product, starmap
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, deepspeed_config_of, why_not_zero3
from pipeline.errors import BaseModelError, UserError
from pipeline.methods import build_model, training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.decoder import ActivationCheckpointing, Decoder
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.flops import FlopsPerToken, count_flops
from pipeline.sizing.memory import Memory, Parameters, count_parameters, estimate_memory
from pipeline.sizing.micro_batch import MicroBatchCosts, measure_micro_batch
from pipeline.sizing.traffic import GATHER, MUON, REDUCE, TENSOR_PARALLEL, Traffic, estimate_traffic

_logger = log.get_logger(__name__)

CHECKPOINTINGS: tuple[ActivationCheckpointing, ...] = ("none", "collaborative", "all")
TP_SIZES = (1, 2, 4, 8)


class Choice(NamedTuple):
    """A layout: ZeRO's stage, the tensor-parallel size, and which layers are recomputed."""

    zero_stage: int
    tp_size: int
    activation_checkpointing: ActivationCheckpointing

    def __str__(self) -> str:
        layers = "" if self.activation_checkpointing == "none" else f", checkpointing {self.activation_checkpointing}"
        return f"ZeRO-{self.zero_stage} x tp {self.tp_size}{layers}"


@dataclass(frozen=True)
class Estimate:
    """What a run costs on one layout: the memory of a GPU, the traffic and the time of a step.

    `host_bytes` are offloaded to the host's memory, per GPU.
    """

    choice: Choice
    memory: Memory
    host_bytes: int
    traffic: tuple[Traffic, ...]
    micro_batches: int
    compute_s: float
    step_s: float

    @property
    def between_bytes(self) -> float:
        """What a GPU sends in a step to other nodes."""
        return sum(traffic.between_bytes for traffic in self.traffic)

    @property
    def inside_bytes(self) -> float:
        """What it sends to GPUs of its own node."""
        return sum(traffic.sent_bytes for traffic in self.traffic) - self.between_bytes

    def fits(self, cluster: Cluster) -> bool:
        """Whether it fits into the memory of a GPU."""
        return self.memory.total <= cluster.usable_bytes


class Estimator:
    """Estimates one run on one cluster. What several layouts share is measured once."""

    def __init__(self, config: RunConfig, spec: DecoderSpec, deepspeed: DeepSpeedConfig, cluster: Cluster) -> None:
        self.config = config
        self.spec = spec
        self.deepspeed = deepspeed
        self.cluster = cluster
        self.tokens_per_step = config.schedule.global_batch_size * config.data.sequence_length
        self.own_choice = Choice(deepspeed.zero_stage, config.parallel.tp_size, config.activation_checkpointing)
        self.flops_per_token = cache(self._count_flops)
        self._costs = cache(self._measure)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameter counts of the run's model."""
        with torch.device("meta"):
            model = training_method(self.config).build(self.spec, SINGLE, "none")
            base = Decoder(replace(self.spec, new_rows=0))
            return count_parameters(model, base, with_muon=self.config.schedule.optimizer == "muon")

    def _count_flops(self, activation_checkpointing: ActivationCheckpointing) -> FlopsPerToken:
        """FLOPs of the forward and backward pass, recomputation included."""
        with torch.device("meta"):
            model = build_model(self.config, self.spec, SINGLE, activation_checkpointing)
        return count_flops(model, self.config.data.sequence_length, self.config.data.kl_fraction)

    def estimate(self, choice: Choice) -> Estimate:
        """The cost of the run on the layout `choice`.

        Raises:
            UserError: the model or the batch cannot be split this way.
        """
        cluster, layout = self.cluster, Layout(self.cluster.gpus, choice.tp_size)
        micro_batches = accumulation_steps(self.config.schedule, layout.dp_size)
        zero, costs = self._micro_batch(choice)
        memory, host_bytes = self.memory(choice)
        traffic = estimate_traffic(costs, zero, layout, micro_batches, cluster)
        flops = self.flops_per_token(choice.activation_checkpointing).total * self.tokens_per_step
        compute_s = flops / (cluster.gpus * cluster.peak_tflops * 1e12 * cluster.mfu)
        step_s = _step_seconds(compute_s, traffic, zero, cluster)
        return Estimate(choice, memory, host_bytes, tuple(traffic), micro_batches, compute_s, step_s)

    def memory(self, choice: Choice) -> tuple[Memory, int]:
        """The memory of a GPU, and the bytes that are offloaded to its host: the quickest part of an estimate.

        Raises:
            UserError: the model cannot be split this way.
        """
        zero, costs = self._micro_batch(choice)
        dp_size = Layout(self.cluster.gpus, choice.tp_size).dp_size
        return estimate_memory(costs, zero, dp_size, asynchronous=self.config.checkpoints.asynchronous)

    def all_choices(self) -> Iterator[Choice]:
        """Every layout worth comparing, and the run's own.

        Tensor parallelism stays inside a node; with a single replica of the model ZeRO has nothing to partition.
        """
        own = self.own_choice
        sizes = {size for size in TP_SIZES if size <= min(self.cluster.gpus, self.cluster.gpus_per_node)}
        stages = (1, 2, 3) if why_not_zero3(self.config) is None else (1, 2)
        for choice in starmap(Choice, product(stages, sorted(sizes | {own.tp_size}), CHECKPOINTINGS)):
            if choice.zero_stage == 1 or choice.tp_size < self.cluster.gpus or choice == own:
                yield choice

    def estimate_all(self) -> tuple[list[Estimate], dict[int, str]]:
        """The estimates of all layouts, and by tensor-parallel size why others are impossible."""
        estimates, refused = [], {}
        for choice in self.all_choices():
            try:
                estimates.append(self.estimate(choice))
            except UserError as error:
                refused[choice.tp_size] = str(error)
        return estimates, refused

    def _micro_batch(self, choice: Choice) -> tuple[DeepSpeedConfig, MicroBatchCosts]:
        zero = self.deepspeed.at_stage(choice.zero_stage)
        return zero, self._costs(choice.tp_size, choice.activation_checkpointing)

    def _measure(self, tp_size: int, checkpointing: ActivationCheckpointing) -> MicroBatchCosts:
        _logger.info("running a micro-batch without data: tp %d, checkpointing %s", tp_size, checkpointing)
        return measure_micro_batch(self.config, self.spec, tp_size, checkpointing, self.deepspeed.dtype)


def _step_seconds(compute_s: float, traffic: list[Traffic], zero: DeepSpeedConfig, cluster: Cluster) -> float:
    """The time of a step, in seconds.

    Tensor-parallel messages block the computation, as Muon's do. Those of ZeRO-2 and 3 overlap with it where
    `overlap_comm` is set; ZeRO-1 sends after the backward pass, as ZeRO-2 gathers after the update.
    """

    def seconds(*purposes: str) -> float:
        return sum(message.seconds(cluster) for message in traffic if message.purpose in purposes)

    blocking = compute_s + seconds(TENSOR_PARALLEL, MUON)
    if not zero.overlaps or zero.zero_stage == 1:
        return blocking + seconds(GATHER, REDUCE)
    if zero.zero_stage == 2:
        return max(blocking, seconds(REDUCE)) + seconds(GATHER)
    return max(blocking, seconds(GATHER, REDUCE))


def open_estimator(config: RunConfig, cluster: Cluster, *, base_config: Path | None = None) -> Estimator:
    """Reads the run's base and DeepSpeed file. `base_config` is the base's config.json, if its folder is missing.

    Raises:
        ConfigError: the DeepSpeed file is invalid for the layout or the run.
        BaseModelError: neither the base's folder nor `base_config` exists.
        LayoutError: the number of GPUs does not divide by the tensor-parallel size.
        DataError: the extended vocabulary is missing, or of another base.
    """
    source = base_config or config.base
    if not source.exists():
        raise BaseModelError(
            f"{source}: no such file or folder; the base's config.json is enough: name it with --base-config"
        )
    deepspeed = deepspeed_config_of(config, Layout(cluster.gpus, config.parallel.tp_size))
    return Estimator(config, extended_spec(config, read_spec(source)), deepspeed, cluster)
