"""The estimate of a run on one layout, and on every layout worth comparing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline import log
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, load_deepspeed_config
from pipeline.errors import BaseModelError, ConfigError, UserError
from pipeline.methods import training_method
from pipeline.methods.method import ActivationCheckpointing
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.flops import FlopsPerToken, count_flops
from pipeline.sizing.gathering import Gathering, estimate_gathering
from pipeline.sizing.memory import Memory, Parameters, ZeroSettings, count_parameters, estimate_memory, zero_settings
from pipeline.sizing.micro_batch import MicroBatchCosts, measure_micro_batch
from pipeline.sizing.traffic import GATHER, TENSOR_PARALLEL, Traffic, estimate_traffic

_logger = log.get_logger(__name__)

CHECKPOINTINGS: tuple[ActivationCheckpointing, ...] = ("none", "collaborative", "all")
TP_SIZES = (1, 2, 4, 8)


class Choice(NamedTuple):
    """What may be chosen for a run: ZeRO's stage, the tensor-parallel size, and which layers are recomputed."""

    zero_stage: int
    tp_size: int
    activation_checkpointing: ActivationCheckpointing

    def __str__(self) -> str:
        layers = "" if self.activation_checkpointing == "none" else f", checkpointing {self.activation_checkpointing}"
        return f"ZeRO-{self.zero_stage} x tp {self.tp_size}{layers}"


@dataclass(frozen=True)
class Estimate:
    """What a run costs on one layout: bytes on a GPU (and, offloaded, on its host), messages and seconds of a step."""

    choice: Choice
    memory: Memory
    host_bytes: int
    traffic: tuple[Traffic, ...]
    micro_batches: int
    compute_s: float
    step_s: float

    @property
    def inside_bytes(self) -> float:
        """What a GPU sends in a step to its own node's."""
        return sum(one.inside_bytes for one in self.traffic)

    @property
    def between_bytes(self) -> float:
        """What a GPU sends in a step to other nodes."""
        return sum(one.between_bytes for one in self.traffic)

    def fits(self, cluster: Cluster) -> bool:
        """Whether a GPU has room for it."""
        return self.memory.total <= cluster.usable_bytes


class Estimator:
    """Estimates for one run on one cluster. What several layouts share is measured once."""

    def __init__(self, config: RunConfig, spec: DecoderSpec, deepspeed: DeepSpeedConfig, cluster: Cluster) -> None:
        self.config = config
        self.spec = spec
        self.deepspeed = deepspeed
        self.cluster = cluster
        self._costs: dict[tuple[int, ActivationCheckpointing], MicroBatchCosts] = {}
        self._flops: dict[ActivationCheckpointing, FlopsPerToken] = {}

    @property
    def own_choice(self) -> Choice:
        """What the run's configuration says."""
        return Choice(self.deepspeed.zero_stage, self.config.parallel.tp_size, self.config.activation_checkpointing)

    @cached_property
    def parameters(self) -> Parameters:
        """How large the run's model is."""
        with torch.device("meta"):
            return count_parameters(self._model("none"), Decoder(self.spec))

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.config.schedule.global_batch_size * self.config.data.sequence_length

    def flops_per_token(self, activation_checkpointing: ActivationCheckpointing) -> FlopsPerToken:
        """Forward and backward, and what is recomputed for it."""
        if activation_checkpointing not in self._flops:
            with torch.device("meta"):
                model = self._model(activation_checkpointing)
                self._flops[activation_checkpointing] = count_flops(model, self.config.data.sequence_length)
        return self._flops[activation_checkpointing]

    def estimate(self, choice: Choice) -> Estimate:
        """The run on the layout `choice`.

        Raises:
            UserError: the model, or the batch, cannot be spread so.
        """
        zero = zero_settings(self.deepspeed, choice.zero_stage)
        layout = Layout(self.cluster.gpus, choice.tp_size)
        micro_batches = accumulation_steps(self.config.schedule, layout.dp_size)
        memory, host_bytes = self.memory(choice)
        costs = self._measured(choice.tp_size, choice.activation_checkpointing, zero)
        gathering = _gathering(costs, zero)
        traffic = estimate_traffic(costs, zero, layout, micro_batches, gathering, self.cluster)
        compute_s = self._compute_s(choice.activation_checkpointing)
        step_s = step_seconds(compute_s, traffic, zero, self.cluster)
        return Estimate(choice, memory, host_bytes, tuple(traffic), micro_batches, compute_s, step_s)

    def memory(self, choice: Choice) -> tuple[Memory, int]:
        """The memory of a GPU and, in bytes, what is kept on its host instead: the quickest part of an estimate.

        Raises:
            UserError: the model cannot be spread so.
        """
        zero = zero_settings(self.deepspeed, choice.zero_stage)
        costs = self._measured(choice.tp_size, choice.activation_checkpointing, zero)
        dp_size = Layout(self.cluster.gpus, choice.tp_size).dp_size
        return estimate_memory(costs, zero, dp_size, _gathering(costs, zero))

    def all_choices(self) -> Iterator[Choice]:
        """Every layout worth comparing, and the run's own.

        Tensor parallelism stays inside a node, and a single replica of the model leaves ZeRO nothing to divide.
        """
        own = self.own_choice
        sizes = {size for size in TP_SIZES if size <= min(self.cluster.gpus, self.cluster.gpus_per_node)}
        for choice in (Choice(*one) for one in product((1, 2, 3), sorted(sizes | {own.tp_size}), CHECKPOINTINGS)):
            if choice.zero_stage == 1 or choice.tp_size < self.cluster.gpus or choice == own:
                yield choice

    def estimate_all(self) -> tuple[list[Estimate], dict[Choice, str]]:
        """Every choice's estimate, and why the others cannot be."""
        estimates, refused = [], {}
        for choice in self.all_choices():
            try:
                estimates.append(self.estimate(choice))
            except UserError as error:
                refused[choice] = str(error)
        return estimates, refused

    def _model(self, activation_checkpointing: ActivationCheckpointing) -> Decoder:
        return training_method(self.config).build(self.spec, SINGLE, activation_checkpointing)

    def _measured(self, tp_size: int, checkpointing: ActivationCheckpointing, zero: ZeroSettings) -> MicroBatchCosts:
        key = tp_size, checkpointing
        if key not in self._costs:
            _logger.info("runs a micro-batch without data: tp %d, checkpointing %s", *key)
            self._costs[key] = measure_micro_batch(self.config, self.spec, tp_size, checkpointing, zero.dtype)
        return self._costs[key]

    def _compute_s(self, checkpointing: ActivationCheckpointing) -> float:
        flops = self.flops_per_token(checkpointing).total * self.tokens_per_step
        return flops / (self.cluster.gpus * self.cluster.peak_tflops * 1e12 * self.cluster.mfu)


def _gathering(costs: MicroBatchCosts, zero: ZeroSettings) -> Gathering | None:
    return estimate_gathering(costs.segments, zero.gathering) if zero.stage == 3 else None


def step_seconds(compute_s: float, traffic: list[Traffic], zero: ZeroSettings, cluster: Cluster) -> float:
    """Computation and messages of a step.

    Tensor parallelism's messages stand in the way of the products and add to them. ZeRO-2's and 3's run beside them
    where `overlap_comm` says so; ZeRO-1 sends after the backward pass.
    """
    waiting = sum(one.seconds(cluster) for one in traffic if one.purpose == TENSOR_PARALLEL)
    beside = sum(one.seconds(cluster) for one in traffic if one.purpose != TENSOR_PARALLEL)
    if not zero.overlaps or zero.stage == 1:
        return compute_s + waiting + beside
    if zero.stage == 2:
        after = sum(one.seconds(cluster) for one in traffic if one.purpose == GATHER)
        return max(compute_s + waiting, beside - after) + after
    return max(compute_s + waiting, beside)


def open_estimator(
    config: RunConfig, cluster: Cluster, *, tp_size: int | None = None, base_config: Path | None = None
) -> Estimator:
    """Reads what the run names; `tp_size` overrides the configuration's, `base_config` is the base's config.json.

    Raises:
        ConfigError: a figure of the cluster cannot be, or DeepSpeed's JSON is not fit for the layout.
        BaseModelError: neither the base's folder nor `base_config` is there.
        LayoutError: the GPUs do not divide by the tensor-parallel size.
    """
    check_cluster(cluster)
    if tp_size is not None:
        if tp_size <= 0:
            raise ConfigError(f"--tp: expected a number above 0, found {tp_size}")
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp_size": tp_size})})
    layout = Layout(cluster.gpus, config.parallel.tp_size)
    spec = read_architecture(config, base_config)
    return Estimator(config, spec, load_deepspeed_config(config.deepspeed, layout), cluster)


def read_architecture(config: RunConfig, base_config: Path | None = None) -> DecoderSpec:
    """The architecture of the run's base, from its folder or from the file `base_config`.

    Raises:
        BaseModelError: neither is there.
    """
    source = base_config or config.base
    if not source.exists():
        raise BaseModelError(
            f"{source}: not here; the base's config.json is all that is needed: name one with --base-config"
        )
    return read_spec(source)


def check_cluster(cluster: Cluster) -> None:
    """Raises ConfigError where a figure cannot be."""
    for setting in fields(cluster):
        value = getattr(cluster, setting.name)
        if value <= 0:
            raise ConfigError(f"--{setting.name.replace('_', '-')}: expected a number above 0, found {value}")
    if cluster.mfu > 1:
        raise ConfigError(f"--mfu: expected a share of the peak, 0 to 1, found {cluster.mfu}")
