"""The estimate of a run on one layout, and on every layout worth comparing: a table, and a recommendation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import product, starmap
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import (
    DeepSpeedConfig,
    accumulation_steps,
    deepspeed_config_of,
    why_not_zero3,
)
from pipeline.errors import BaseModelError, UserError
from pipeline.log import counted
from pipeline.methods import build_model, training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.decoder import ActivationCheckpointing, Decoder
from pipeline.model.from_hf import read_spec
from pipeline.model.merged_model import describe_serving, merged_unsupported_reason
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.scale.plan import plan_expansion
from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster
from pipeline.sizing.flops import FlopsPerToken, count_flops
from pipeline.sizing.memory import Memory, Parameters, count_parameters, estimate_memory
from pipeline.sizing.micro_batch import MicroBatchCosts, measure_micro_batch
from pipeline.sizing.traffic import GATHER, MUON, REDUCE, TENSOR_PARALLEL, Traffic, estimate_traffic

CHECKPOINTINGS: tuple[ActivationCheckpointing, ...] = ("none", "collaborative", "all")
TP_SIZES = (1, 2, 4, 8)
_COLUMNS = 100
"""The width of a report."""
_TOLERANCE = 0.03
"""Steps whose times differ by less than this share count as equally fast: the estimate is not more precise."""


class Choice(NamedTuple):
    """A layout: ZeRO's stage, the tensor-parallel size, and which layers are recomputed."""

    zero_stage: int
    tp_size: int
    activation_checkpointing: ActivationCheckpointing

    def __str__(self) -> str:
        layers = (
            ""
            if self.activation_checkpointing == "none"
            else f", checkpointing {self.activation_checkpointing}"
        )
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
        """Whether it fits if the estimate is exact."""
        return self.memory.total <= cluster.usable_bytes

    def is_safe(self, cluster: Cluster) -> bool:
        """Whether it also fits if the estimate is as wrong as it may be."""
        return self.memory.total <= cluster.recommended_bytes


class Estimator:
    """Estimates one run on one cluster. What several layouts share is measured once."""

    def __init__(
        self, config: RunConfig, spec: DecoderSpec, deepspeed: DeepSpeedConfig, cluster: Cluster
    ) -> None:
        self.config = config
        self.spec = spec
        self.deepspeed = deepspeed
        self.cluster = cluster
        self.tokens_per_step = config.schedule.global_batch_size * config.data.sequence_length
        self.own_choice = Choice(
            deepspeed.zero_stage, config.parallel.tp_size, config.activation_checkpointing
        )
        self.flops_per_token = cache(self._count_flops)
        self._costs = cache(self._measure)

    @cached_property
    def parameters(self) -> Parameters:
        with torch.device("meta"):
            model = training_method(self.config).build(self.spec, SINGLE, "none")
            base = Decoder(replace(self.spec, new_tokens=0))
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
        return Estimate(
            choice, memory, host_bytes, tuple(traffic), micro_batches, compute_s, step_s
        )

    def memory(self, choice: Choice) -> tuple[Memory, int]:
        """The memory of a GPU, and the bytes that are offloaded to its host: the quickest part of an estimate.

        Raises:
            UserError: the model cannot be split this way.
        """
        zero, costs = self._micro_batch(choice)
        dp_size = Layout(self.cluster.gpus, choice.tp_size).dp_size
        return estimate_memory(
            costs, zero, dp_size, asynchronous=self.config.checkpoints.asynchronous
        )

    def all_choices(self) -> Iterator[Choice]:
        """Every layout worth comparing, and the run's own.

        Tensor parallelism stays inside a node; with a single replica of the model ZeRO has nothing to partition.
        """
        own = self.own_choice
        sizes = {
            size for size in TP_SIZES if size <= min(self.cluster.gpus, self.cluster.gpus_per_node)
        }
        stages = (1, 2, 3) if why_not_zero3(self.config) is None else (1, 2)
        for choice in starmap(
            Choice, product(stages, sorted(sizes | {own.tp_size}), CHECKPOINTINGS)
        ):
            if choice.zero_stage == 1 or choice.tp_size < self.cluster.gpus or choice == own:
                yield choice

    def estimate_all(self, *, every: bool = False) -> tuple[list[Estimate], dict[int, str]]:
        """The estimates of all layouts, and by tensor-parallel size why others are impossible.

        Recomputing more costs time and nothing else. Unless `every` one is wanted, a layout is left out if it fits
        with less recomputation, which also saves running its micro-batch.
        """
        estimates: list[Estimate] = []
        refused: dict[int, str] = {}
        fitting: set[tuple[int, int]] = set()
        choices = sorted(
            self.all_choices(),
            key=lambda choice: CHECKPOINTINGS.index(choice.activation_checkpointing),
        )
        for choice in counted(choices, "estimating", len(choices), " layouts"):
            place = choice.zero_stage, choice.tp_size
            if place in fitting and choice != self.own_choice and not every:
                continue
            try:
                estimate = self.estimate(choice)
            except UserError as error:
                refused[choice.tp_size] = str(error)
                continue
            estimates.append(estimate)
            if estimate.is_safe(self.cluster):
                fitting.add(place)
        return sorted(estimates, key=_place), refused

    def worth_a_row(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """One for each ZeRO stage and tensor-parallel size: that with the most recomputation; and the run's own."""
        last = {(one.choice.zero_stage, one.choice.tp_size): one.choice for one in estimates}
        wanted = {*last.values(), self.own_choice}
        return [one for one in estimates if one.choice in wanted]

    def _micro_batch(self, choice: Choice) -> tuple[DeepSpeedConfig, MicroBatchCosts]:
        zero = self.deepspeed.at_stage(choice.zero_stage)
        return zero, self._costs(choice.tp_size, choice.activation_checkpointing)

    def _measure(self, tp_size: int, checkpointing: ActivationCheckpointing) -> MicroBatchCosts:
        return measure_micro_batch(
            self.config, self.spec, tp_size, checkpointing, self.deepspeed.dtype
        )


def _step_seconds(
    compute_s: float, traffic: list[Traffic], zero: DeepSpeedConfig, cluster: Cluster
) -> float:
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


def open_estimator(
    config: RunConfig, cluster: Cluster, *, base_config: Path | None = None
) -> Estimator:
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


def recommend(estimates: Sequence[Estimate], cluster: Cluster) -> tuple[Choice | None, str]:
    """The fastest layout that fits even if its estimate is wrong by MEMORY_ERROR, and the reason; None if none does.

    Among equally fast ones it is the one with the smallest tensor-parallel size, then the least recomputation, then the
    lowest ZeRO stage.
    """
    if not estimates:
        return None, "no layout is possible; see the reasons given for each"
    fitting = [estimate for estimate in estimates if estimate.is_safe(cluster)]
    usable = f"{cluster.usable_bytes / GIB:.0f}"
    if not fitting:
        least = min(estimates, key=lambda estimate: estimate.memory.total)
        margin = f", which leaves less than the {MEMORY_ERROR:.0%} that it may be wrong by"
        return None, (
            f"nothing fits: {least.choice} needs {_gib(least)} GiB of the usable {usable}"
            f"{margin if least.fits(cluster) else ''}; "
            "take more GPUs, a smaller schedule.micro_batch_size, or ds_configs/zero3_offload.json"
        )
    fastest = min(estimate.step_s for estimate in fitting)
    best = min(
        (estimate for estimate in fitting if estimate.step_s <= fastest * (1 + _TOLERANCE)),
        key=_effort,
    )
    reasons = [f"{_gib(best)} of {usable} usable GiB, {best.step_s:.2f} s a step"]
    too_large = [
        other
        for other in estimates
        if _effort(other) < _effort(best) and not other.is_safe(cluster)
    ]
    if too_large:
        nearest = min(too_large, key=lambda estimate: estimate.memory.total)
        reasons.append(f"{nearest.choice} would need {_gib(nearest)} GiB")
    for other in estimates:
        if best.choice.zero_stage < 3 and other.choice == best.choice._replace(zero_stage=3):
            more_gb = (
                other.inside_bytes + other.between_bytes - best.inside_bytes - best.between_bytes
            ) / 1e9
            reasons.append(
                f"ZeRO-3 would send {more_gb:.1f} GB more a step to gather a base that fits"
            )
    return best.choice, "; ".join(reasons)


def _effort(estimate: Estimate) -> tuple[int, int, int]:
    choice = estimate.choice
    return choice.tp_size, CHECKPOINTINGS.index(choice.activation_checkpointing), choice.zero_stage


def _place(estimate: Estimate) -> tuple[int, int, int]:
    """The order of a table."""
    choice = estimate.choice
    return choice.zero_stage, choice.tp_size, CHECKPOINTINGS.index(choice.activation_checkpointing)


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f}"


def report(estimator: Estimator, *, every: bool = False) -> tuple[str, Choice | None]:
    """The model, a table of layouts, the time of the run's own and of the recommended one; and the recommended one.

    `every` layout is listed, those too that recompute more than they must.
    """
    estimates, refused = estimator.estimate_all(every=every)
    recommended, reason = recommend(estimates, estimator.cluster)
    texts = [f"  not tp {tp_size}: {reason}" for tp_size, reason in refused.items()]
    texts.append("")
    own = estimator.own_choice
    chosen = {own: "this run's", recommended: "recommended"}
    if own == recommended:
        chosen = {own: "this run's, recommended"}
    texts += [
        _detail(one, chosen[one.choice], estimator) for one in estimates if one.choice in chosen
    ]
    if own.tp_size in refused:
        texts.append(f"{own} (this run's): IMPOSSIBLE, for the reason above")
    texts += ["", f"recommended: {recommended or 'no layout'}: {reason}"]
    shown = estimates if every else estimator.worth_a_row(estimates)
    lines = [*map(_wrapped, _model_lines(estimator)), "", *_table_lines(shown, estimator.cluster)]
    lines += map(_wrapped, texts)
    return "\n".join(lines), recommended


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, _COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _model_lines(estimator: Estimator) -> Iterator[str]:
    cluster, config, spec = estimator.cluster, estimator.config, estimator.spec
    flops = estimator.flops_per_token("none")
    yield f"parameters  {estimator.parameters}"
    yield (
        f"FLOPs       {flops.total / 1e9:.2f} G a token ({flops.matrix / 1e9:.2f} matrix products, "
        f"{flops.attention / 1e9:.2f} attention)"
    )
    yield f"batch       {estimator.tokens_per_step:,} tokens a step, {config.schedule.steps:,} steps"
    yield (
        f"cluster     {cluster.gpus} GPUs on {cluster.nodes} node(s), {cluster.usable_bytes / GIB:.0f} usable of "
        f"{cluster.gpu_memory_gib:.0f} GiB, {cluster.peak_tflops:.0f} TFLOP/s at MFU {cluster.mfu:.2f}"
    )
    if isinstance(config.method, ScaleMethod):
        plan = plan_expansion(config.method, spec.widths, spec.num_layers)
        if merged_unsupported_reason(plan, spec, gated=False) is None:
            yield f"serving     a merged export: {describe_serving(plan.expansion, spec)}"


def _table_lines(estimates: Sequence[Estimate], cluster: Cluster) -> Iterator[str]:
    """GiB on a GPU, and GB that it sends in a step; the kinds of memory are the larger ones, and all others."""
    head = f"{'ZeRO':>4} {'tp':>3} {'checkpointing':<13} {'weights':>7} {'states':>7} {'activations':>11} {'other':>6}"
    yield f"{head} {'total':>7} {'fits':>5} {'node GB':>9} {'net GB':>8} {'s/step':>8}"
    for estimate in estimates:
        stage, tp_size, checkpointing = estimate.choice
        memory = estimate.memory
        states = memory.gradients + memory.optimizer
        other = memory.total - memory.weights - states - memory.activations
        fits = "yes" if estimate.is_safe(cluster) else "tight" if estimate.fits(cluster) else "no"
        yield (
            f"{stage:>4} {tp_size:>3} {checkpointing:<13} {memory.weights / GIB:>7.2f} {states / GIB:>7.2f} "
            f"{memory.activations / GIB:>11.2f} {other / GIB:>6.2f} {memory.total / GIB:>7.2f} {fits:>5} "
            f"{estimate.inside_bytes / 1e9:>9.1f} {estimate.between_bytes / 1e9:>8.1f} {estimate.step_s:>8.2f}"
        )


def _detail(estimate: Estimate, whose: str, estimator: Estimator) -> str:
    steps, step_s, cluster = estimator.config.schedule.steps, estimate.step_s, estimator.cluster
    per_gpu = estimator.tokens_per_step / step_s / cluster.gpus
    on_host = (
        f", {estimate.host_bytes / GIB:.2f} GiB a GPU in host memory" if estimate.host_bytes else ""
    )
    kinds = ", ".join(
        f"{kind.name} {getattr(estimate.memory, kind.name) / GIB:.2f}" for kind in fields(Memory)
    )
    room = ""
    if not estimate.fits(cluster):
        room = f"DOES NOT FIT, it needs {_gib(estimate)} of {cluster.usable_bytes / GIB:.0f} usable GiB: "
    elif not estimate.is_safe(cluster):
        room = f"TIGHT, less than {MEMORY_ERROR:.0%} of {cluster.usable_bytes / GIB:.0f} usable GiB are left: "
    return (
        f"{estimate.choice} ({whose}): {room}{estimate.micro_batches} micro-batches a step, {step_s:.2f} s "
        f"({estimate.compute_s:.2f} computing), {per_gpu:,.0f} tokens/s a GPU, {steps * step_s / 3600:.1f} h{on_host}; "
        f"GiB: {kinds}"
    )
