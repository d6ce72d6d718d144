"""The estimate of a run on one layout, and on every layout worth comparing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from pipeline.config.run import RunConfig
from pipeline.config.stage_plan import TrainingStage, training_stages
from pipeline.deepspeed_config import DeepSpeedConfig, accumulation_steps, deepspeed_config_of
from pipeline.errors import UserError
from pipeline.log import counted
from pipeline.methods.build_model import build_model
from pipeline.methods.registry import training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.bases import read_spec
from pipeline.model.causal_decoder import ActivationCheckpointing
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.optimizers.optimizer import check_optimizer
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.scale.plan import GATE_LAYER, checked_gate_layer
from pipeline.sizing.cluster import Cluster, Speed, gpu_speed
from pipeline.sizing.cpu_speed import cpu_speed
from pipeline.sizing.described_base import described_base
from pipeline.sizing.flops import (
    FlopsPerToken,
    ServedFlops,
    count_difference_flops,
    count_flops,
    count_served_flops,
)
from pipeline.sizing.layouts import Choice, Place, layouts_to_compare, recomputation_rank
from pipeline.sizing.memory import Memory, estimate_memory
from pipeline.sizing.micro_batch import MicroBatchCosts, measure_micro_batch
from pipeline.sizing.parameters import Parameters, parameters_of
from pipeline.sizing.traffic import (
    EXPERT_PARALLEL,
    GATHER,
    MUON,
    REDUCE,
    TENSOR_PARALLEL,
    Traffic,
    estimate_traffic,
)

_FLOPS_PER_PARAMETER = 6
"""Of a token in training: two in the forward pass, four in the backward pass."""


@dataclass(frozen=True)
class Estimate:
    """What a run costs on one layout.

    Attributes:
        choice: the layout.
        memory: the bytes on a GPU.
        host_bytes: the bytes in the host's memory, for each GPU.
        traffic: the messages that a GPU sends in a step.
        micro_batches: the number of micro-batches in a step.
        compute_s: seconds of computation in a step.
        step_s: seconds of a step, with its messages.
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
        """The bytes that a GPU sends to other nodes in a step."""
        return sum(traffic.between_bytes for traffic in self.traffic)

    @property
    def inside_bytes(self) -> float:
        """The bytes that a GPU sends to other GPUs of its node in a step."""
        return self.sent_bytes - self.between_bytes

    @property
    def sent_bytes(self) -> float:
        """The bytes that a GPU sends in a step."""
        return sum(traffic.sent_bytes for traffic in self.traffic)

    def fits(self, cluster: Cluster) -> bool:
        """Whether it fits if the estimate is exact."""
        return self.memory.total <= cluster.usable_bytes

    def is_safe(self, cluster: Cluster) -> bool:
        """Whether it also fits if the estimate is too low by MEMORY_ERROR."""
        return self.memory.total <= cluster.recommended_bytes


class Estimator:
    """Estimates a run on a cluster, on any layout. Results that several layouts share are cached.

    In a run with stages it estimates one of them; see `estimator_of`.

    Attributes:
        stage: the stage that is estimated.
        stages: the estimators of all stages.
        tokens_per_step: of the stage.
        own_choice: the run's own layout.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: DecoderSpec,
        deepspeed: DeepSpeedConfig,
        cluster: Cluster,
        stage: TrainingStage | None = None,
    ) -> None:
        self.config = config
        self.spec = spec
        self.deepspeed = deepspeed
        self.cluster = cluster
        self.stage = stage or training_stages(config)[0]
        self.stages: Sequence[Estimator] = [self]
        self.tokens_per_step = self.stage.tokens_per_step
        is_recomputed = config.activation_checkpointing != "none"
        self.own_choice = Choice(
            deepspeed.zero_stage,
            config.parallel.tp_size,
            config.activation_checkpointing,
            config.recomputation_keeps if is_recomputed else "nothing",
            config.parallel.expert_size,
        )
        # Building a model and running a micro-batch take seconds, and layouts share their results.
        self.flops_per_token = cache(self._count_flops)
        self._costs = cache(self._measure)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the run's model."""
        return parameters_of(self.config, self.spec)

    @cached_property
    def speed(self) -> Speed:
        """What a rank computes in a second; on CPUs it is measured, which takes a second or two."""
        if self.cluster.on_cpu:
            return cpu_speed(self.spec, self.deepspeed.dtype, self.cluster)
        return gpu_speed(self.cluster, has_experts=self.parameters.active < self.parameters.base)

    @property
    def parameter_bound(self) -> str | None:
        """Why the number of parameters is an upper bound; None: it is exact."""
        return training_method(self.config).parameter_bound

    def _count_flops(
        self, activation_checkpointing: ActivationCheckpointing, kept_results: KeptResults
    ) -> FlopsPerToken:
        """FLOPs of the forward and backward pass, recomputation included."""
        with torch.device("meta"):
            config = self.stage.config
            model = build_model(config, self.spec, SINGLE, activation_checkpointing, kept_results)
        return count_flops(model, config.data.sequence_length, config.data.kl_fraction)

    def served_flops(self) -> ServedFlops | None:
        """FLOPs a token of inference with the trained model; None for a run without a gate."""
        gate = self.config.gate
        if gate is None:
            return None
        with torch.device("meta"):
            model = build_model(self.config, self.spec, SINGLE, "none")
        length = self.config.data.sequence_length
        if model.plan is None:
            # Full fine-tuning: an open token is read by the trained model, and by the base's layers
            # below the gate.
            layer = checked_gate_layer(gate.layer, GATE_LAYER, self.spec.num_layers)
            return count_difference_flops(model, length, layer)
        return count_served_flops(model, length, model.plan.gate_layer(gate.layer))

    def estimate(self, choice: Choice) -> Estimate:
        """The cost of the run on a layout.

        Raises:
            UserError: the model or the batch cannot be split this way.
        """
        cluster = self.cluster
        layout = choice.layout(cluster.gpus)
        for estimator in self.stages:
            # Raises where the layout does not divide a stage's batch, of the other stages too.
            accumulation_steps(estimator.stage.config.schedule, layout.dp_size)
        micro_batches = accumulation_steps(self.stage.config.schedule, layout.dp_size)
        zero, costs = self._micro_batch(choice)
        memory, host_bytes = self.memory(choice)
        traffic = estimate_traffic(costs, zero, layout, micro_batches, cluster)
        per_token = self.flops_per_token(choice.activation_checkpointing, choice.kept_results)
        flops = per_token.total * self.tokens_per_step
        # Recomputed FLOPs take time as others do, so that the MFU is of all FLOPs here: hardware
        # FLOPs utilisation in the words of PaLM (Chowdhery et al. 2022, appendix B).
        compute_s = flops / (cluster.gpus * self.speed.flops_per_second)
        return Estimate(
            choice=choice,
            memory=memory,
            host_bytes=host_bytes,
            traffic=tuple(traffic),
            micro_batches=micro_batches,
            compute_s=compute_s,
            step_s=_step_seconds(compute_s, traffic, zero, cluster),
        )

    def memory(self, choice: Choice) -> tuple[Memory, int]:
        """The memory of a GPU, and the bytes in its host's memory.

        Only this part of an estimate is needed where no time is reported; it is the quickest one.

        Raises:
            UserError: the model cannot be split this way.
        """
        zero, costs = self._micro_batch(choice)
        dp_size = choice.layout(self.cluster.gpus).dp_size
        return estimate_memory(
            costs, zero, dp_size, asynchronous=self.config.checkpoints.asynchronous
        )

    def choices(self) -> list[Choice]:
        """Every layout worth comparing, and the run's own."""
        return layouts_to_compare(self.config, self.spec, self.cluster, self.own_choice)

    def estimate_all(self, *, every: bool = False) -> tuple[list[Estimate], dict[str, str]]:
        """The estimates of the layouts worth comparing.

        More recomputation saves memory and costs time. So of layouts that differ in it alone, those
        with more than the least that fits are left out, unless `every` is set.

        Returns:
            The estimates, in the order of a table.
            Why other layouts are impossible, by the sizes of their groups.
        """
        estimates: list[Estimate] = []
        refused: dict[str, str] = {}
        places: dict[Place, list[Choice]] = defaultdict(list)
        # The least recomputation first.
        for choice in sorted(self.choices(), key=recomputation_rank):
            places[choice.place].append(choice)
        for choices in counted(places.values(), "estimating", len(places), " layouts"):
            try:
                found = self._estimate_place(choices, every=every)
            except UserError as error:
                refused[choices[0].groups] = str(error)
                continue
            estimates += found
        return sorted(estimates, key=_place), refused

    def _estimate_place(self, choices: Sequence[Choice], *, every: bool) -> list[Estimate]:
        """The estimates of layouts that differ in recomputation alone, the least of it first.

        Each takes seconds, for a micro-batch is run. So most are not made where nothing fits.

        Raises:
            UserError: as `estimate`.
        """
        if every:
            return [self.estimate(choice) for choice in choices]
        least = self.estimate(choices[0])
        estimates = {choices[0]: least}
        if self.own_choice in choices:
            estimates[self.own_choice] = self.estimate(self.own_choice)
        # Recomputation cannot help where what it does not touch is already too large.
        if not least.is_safe(self.cluster) and self._may_fit(least):
            most = self.estimate(choices[-1])
            estimates[choices[-1]] = most
            if most.is_safe(self.cluster):
                enough = self._least_that_fits(choices[1:])
                if choices[-1] != self.own_choice:
                    del estimates[choices[-1]]
                estimates[enough.choice] = enough
        return list(estimates.values())

    def _may_fit(self, estimate: Estimate) -> bool:
        """Whether the layout might fit if its activations took no memory."""
        memory = estimate.memory
        passing = memory.activations + memory.loss + memory.temporary
        return memory.total - passing <= self.cluster.recommended_bytes

    def _least_that_fits(self, choices: Sequence[Choice]) -> Estimate:
        """The first of the layouts that fits; the last one does, and later ones take less."""
        first, last = 0, len(choices) - 1
        while first < last:
            middle = (first + last) // 2
            if self.estimate(choices[middle]).is_safe(self.cluster):
                last = middle
            else:
                first = middle + 1
        return self.estimate(choices[last])

    def worth_a_row(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """The estimates to show: one for each ZeRO stage and sizes of groups, and the run's own.

        Of those that differ in recomputation only it is the one with the least that fits, or with
        the most that was estimated where none fits.
        """
        shown: dict[Place, Estimate] = {}
        for estimate in estimates:  # Sorted by recomputation.
            before = shown.get(estimate.choice.place)
            if before is None or not before.is_safe(self.cluster):
                shown[estimate.choice.place] = estimate
        chosen = {self.own_choice, *(estimate.choice for estimate in shown.values())}
        return [estimate for estimate in estimates if estimate.choice in chosen]

    def _micro_batch(self, choice: Choice) -> tuple[DeepSpeedConfig, MicroBatchCosts]:
        """DeepSpeed's configuration and the costs of a micro-batch on a layout."""
        zero = self.deepspeed.at_stage(choice.zero_stage)
        costs = self._costs(
            choice.tp_size,
            choice.activation_checkpointing,
            choice.kept_results,
            choice.expert_size,
        )
        return zero, costs

    def _measure(
        self,
        tp_size: int,
        checkpointing: ActivationCheckpointing,
        kept_results: KeptResults,
        expert_size: int,
    ) -> MicroBatchCosts:
        return measure_micro_batch(
            self.stage.config,
            self.spec,
            tp_size,
            checkpointing,
            self.deepspeed.dtype,
            kept_results,
            expert_size,
        )

    def run_seconds(self, choice: Choice) -> float:
        """The seconds that all steps of the run take on a layout, without validations and saves.

        Raises:
            UserError: as `estimate`.
        """
        seconds = 0.0
        for estimator in self.stages:
            seconds += estimator.stage.steps * estimator.estimate(choice).step_s
        return seconds

    def rough_seconds(self) -> float:
        """About the seconds of all steps where no step can be traced: see `NotTracedError`.

        By the rule of 6 FLOPs for each parameter that computes a token, and the ranks' speed.
        """
        tokens = 0
        for estimator in self.stages:
            tokens += estimator.stage.steps * estimator.tokens_per_step
        flops = _FLOPS_PER_PARAMETER * (self.parameters.active + self.parameters.expansion) * tokens
        return flops / (self.cluster.gpus * self.speed.flops_per_second)


def estimator_of(
    config: RunConfig, spec: DecoderSpec, deepspeed: DeepSpeedConfig, cluster: Cluster
) -> Estimator:
    """The estimator of a run; with stages, of the stage that takes the most memory."""
    stages: list[Estimator] = []
    for stage in training_stages(config):
        stages.append(Estimator(config, spec, deepspeed, cluster, stage))
    largest = stages[0]
    if len(stages) > 1:
        # Where the run's layout is impossible, the first stage serves: its estimate raises the
        # error.
        with suppress(UserError):
            largest = max(stages, key=_bytes_of_own_choice)
    largest.stages = stages
    return largest


def _bytes_of_own_choice(estimator: Estimator) -> int:
    memory, _ = estimator.memory(estimator.own_choice)
    return memory.total


def _step_seconds(
    compute_s: float, traffic: list[Traffic], zero: DeepSpeedConfig, cluster: Cluster
) -> float:
    """The time of a step, in seconds.

    The messages of tensor parallelism, of expert parallelism and of Muon block the computation. The
    reductions of ZeRO-2 and all messages of ZeRO-3 overlap with it if `overlap_comm` is set. ZeRO-1
    reduces after the backward pass, and ZeRO-1 and 2 gather after the update.
    """
    seconds: dict[str, float] = defaultdict(float)
    for message in traffic:
        seconds[message.purpose] += message.seconds(cluster)
    blocking = compute_s + seconds[TENSOR_PARALLEL] + seconds[EXPERT_PARALLEL] + seconds[MUON]
    gather_and_reduce = seconds[GATHER] + seconds[REDUCE]
    if not zero.overlaps or zero.zero_stage == 1:
        return blocking + gather_and_reduce
    if zero.zero_stage == 2:
        return max(blocking, seconds[REDUCE]) + seconds[GATHER]
    # Of two things that run at the same time, the longer one decides.
    return max(blocking, gather_and_reduce)


def open_estimator(
    config: RunConfig, cluster: Cluster, *, base_config: Path | None = None
) -> Estimator:
    """The estimator of a run, whose base and DeepSpeed file it reads.

    Args:
        config: the run.
        cluster: the GPUs.
        base_config: the base's config.json, if the base's folder is missing.

    Raises:
        ConfigError: the DeepSpeed file is invalid for the layout or the run.
        BaseModelError: neither the base's folder nor `base_config` exists.
        LayoutError: the number of GPUs does not divide by the tensor-parallel size, or what remains
            by the number of ranks that share experts.
        DataError: the extended vocabulary is missing, or of another base.
    """
    source = described_base(config, base_config)
    parallel = config.parallel
    layout = Layout(cluster.gpus, parallel.tp_size, parallel.expert_size)
    deepspeed = deepspeed_config_of(config, layout)
    check_optimizer(config.schedule, deepspeed)
    spec = read_spec(source, config.base_code)
    return estimator_of(config, extended_spec(config, spec), deepspeed, cluster)


def _place(estimate: Estimate) -> tuple[int, int, int, int]:
    """The order of a table."""
    choice = estimate.choice
    return choice.zero_stage, choice.tp_size, choice.expert_size, recomputation_rank(choice)
