"""The estimate of a run on one layout, and on every layout worth comparing.

The report is tables of both, and a recommendation.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.config.stage_plan import TrainingStage, training_stages
from pipeline.deepspeed_config import (
    DeepSpeedConfig,
    accumulation_steps,
    deepspeed_config_of,
    zero3_unsupported_reason,
)
from pipeline.errors import BaseModelError, UserError
from pipeline.hosted.bases import read_spec
from pipeline.hosted.decoder import HostedDecoder
from pipeline.log import counted
from pipeline.methods import build_model, training_method
from pipeline.methods.scale import FrozenBaseMethod
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.causal_decoder import ActivationCheckpointing
from pipeline.model.decoder import Decoder
from pipeline.model.merged_model import describe_serving, merged_unsupported_reason
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, Layout
from pipeline.scale.plan import GATE_LAYER, checked_gate_layer, plan_expansion
from pipeline.sizing.cluster import GIB, MEMORY_ERROR, Cluster
from pipeline.sizing.flops import (
    FlopsPerToken,
    ServedFlops,
    count_difference_flops,
    count_flops,
    count_served_flops,
)
from pipeline.sizing.memory import (
    Memory,
    Parameters,
    count_parameters,
    estimate_memory,
    training_state_bytes,
)
from pipeline.sizing.micro_batch import MicroBatchCosts, measure_micro_batch
from pipeline.sizing.traffic import (
    EXPERT_PARALLEL,
    GATHER,
    MUON,
    REDUCE,
    TENSOR_PARALLEL,
    Traffic,
    estimate_traffic,
)

RECOMPUTATIONS: tuple[tuple[ActivationCheckpointing, KeptResults], ...] = (
    ("none", "nothing"),
    ("collaborative", "products"),
    ("all", "products"),
    ("collaborative", "attention"),
    ("collaborative", "nothing"),
    ("all", "attention"),
    ("all", "nothing"),
)
"""Layers that are recomputed, and what they keep: about from the least time to the least memory."""
TP_SIZES = (1, 2, 4, 8)
_COLUMNS = 100
"""The width of a report."""
_TOLERANCE = 0.03
"""Steps whose times differ by less than this share count as equally fast: the estimate is not more
precise."""


class Choice(NamedTuple):
    """A layout: ZeRO's stage, the tensor-parallel size, which layers are recomputed, what these
    keep, and how many ranks share experts."""

    zero_stage: int
    tp_size: int
    activation_checkpointing: ActivationCheckpointing
    kept_results: KeptResults = "nothing"
    expert_size: int = 1

    def layout(self, gpus: int) -> Layout:
        """The layout of the ranks on so many GPUs.

        Raises:
            LayoutError: they do not divide.
        """
        return Layout(gpus, self.tp_size, self.expert_size)

    @property
    def groups(self) -> str:
        """The sizes of the groups that share a layer: the tensor-parallel size, `x ep` and how many
        ranks share experts, where several do."""
        if self.expert_size == 1:
            return str(self.tp_size)
        return f"{self.tp_size} x ep {self.expert_size}"

    def __str__(self) -> str:
        text = f"ZeRO-{self.zero_stage} x tp {self.groups}"
        if self.activation_checkpointing != "none":
            text += f", checkpointing {self.activation_checkpointing}"
        if self.kept_results != "nothing":
            text += f" but {self.kept_results}"
        return text


@dataclass(frozen=True)
class Estimate:
    """What a run costs on one layout.

    Attributes:
        choice: the layout.
        memory: of a GPU, in bytes.
        host_bytes: what is offloaded to the host's memory, per GPU.
        traffic: what a GPU sends in a step.
        micro_batches: of a step.
        compute_s: seconds of a step's computation.
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
        """What a GPU sends in a step to other nodes."""
        return sum(traffic.between_bytes for traffic in self.traffic)

    @property
    def inside_bytes(self) -> float:
        """What a GPU sends in a step to others of its own node."""
        return self.sent_bytes - self.between_bytes

    @property
    def sent_bytes(self) -> float:
        """What a GPU sends in a step."""
        return sum(traffic.sent_bytes for traffic in self.traffic)

    def fits(self, cluster: Cluster) -> bool:
        """Whether it fits if the estimate is exact."""
        return self.memory.total <= cluster.usable_bytes

    def is_safe(self, cluster: Cluster) -> bool:
        """Whether it also fits if the estimate is as wrong as it may be."""
        return self.memory.total <= cluster.recommended_bytes


class Estimator:
    """Estimates one run on one cluster. What several layouts share is measured once.

    Of a run that trains in stages it estimates one, `stage`; see `estimator_of`.
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
        # Layouts share these: each is measured once.
        self.flops_per_token = cache(self._count_flops)
        self._costs = cache(self._measure)

    @cached_property
    def parameters(self) -> Parameters:
        return parameters_of(self.config, self.spec)

    @property
    def has_uncounted_rows(self) -> bool:
        """Whether every token counts as having an own row, as they are not chosen yet."""
        method = training_method(self.config)
        return isinstance(method, FrozenBaseMethod) and method.has_uncounted_rows

    def _count_flops(
        self, activation_checkpointing: ActivationCheckpointing, kept_results: KeptResults
    ) -> FlopsPerToken:
        """FLOPs of the forward and backward pass, recomputation included."""
        with torch.device("meta"):
            config = self.stage.config
            model = build_model(config, self.spec, SINGLE, activation_checkpointing, kept_results)
        return count_flops(model, config.data.sequence_length, config.data.kl_fraction)

    def served_flops(self) -> ServedFlops | None:
        """FLOPs of a token that the finished model reads; None for a run without a gate."""
        gate = self.config.gate
        if gate is None:
            return None
        with torch.device("meta"):
            model = build_model(self.config, self.spec, SINGLE, "none")
        length = self.config.data.sequence_length
        if model.plan is None:
            # Full fine-tuning: a second model, and the base's layers below the gate beside it.
            layer = checked_gate_layer(gate.layer, GATE_LAYER, self.spec.num_layers)
            return count_difference_flops(model, length, layer)
        return count_served_flops(model, length, model.plan.gate_layer(gate.layer))

    def estimate(self, choice: Choice) -> Estimate:
        """The cost of the run on the layout `choice`.

        Raises:
            UserError: the model or the batch cannot be split this way.
        """
        cluster = self.cluster
        layout = choice.layout(cluster.gpus)
        for estimator in self.stages:
            # A layout must divide the batches of all stages.
            accumulation_steps(estimator.stage.config.schedule, layout.dp_size)
        micro_batches = accumulation_steps(self.stage.config.schedule, layout.dp_size)
        zero, costs = self._micro_batch(choice)
        memory, host_bytes = self.memory(choice)
        traffic = estimate_traffic(costs, zero, layout, micro_batches, cluster)
        per_token = self.flops_per_token(choice.activation_checkpointing, choice.kept_results)
        flops = per_token.total * self.tokens_per_step
        # The MFU here includes recomputed FLOPs (hardware FLOPs utilisation), since what is
        # recomputed takes time, too.
        compute_s = flops / (cluster.gpus * cluster.peak_tflops * 1e12 * cluster.mfu)
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
        """The memory of a GPU, and the bytes that are offloaded to its host.

        It is the quickest part of an estimate.

        Raises:
            UserError: the model cannot be split this way.
        """
        zero, costs = self._micro_batch(choice)
        dp_size = choice.layout(self.cluster.gpus).dp_size
        return estimate_memory(
            costs, zero, dp_size, asynchronous=self.config.checkpoints.asynchronous
        )

    def all_choices(self) -> Iterator[Choice]:
        """Every layout worth comparing, and the run's own.

        Tensor parallelism stays inside a node; with a single replica of the model ZeRO has nothing
        to partition. Experts over ranks are an alternative to it.
        """
        own = self.own_choice
        recomputations = RECOMPUTATIONS
        if not self.spec.is_native:
            # Hosted layers keep nothing where they are recomputed.
            recomputations = tuple(one for one in RECOMPUTATIONS if one[1] == "nothing")
        largest = min(self.cluster.gpus, self.cluster.gpus_per_node)
        sizes = {own.tp_size, *(size for size in TP_SIZES if size <= largest)}
        stages = (1, 2, 3) if zero3_unsupported_reason(self.config) is None else (1, 2)
        for stage, tp_size, recomputation in product(stages, sorted(sizes), recomputations):
            choice = Choice(stage, tp_size, *recomputation)
            has_replicas = tp_size < self.cluster.gpus
            if stage == 1 or has_replicas or choice == own:
                yield choice
        groups = [(1, expert_size) for expert_size in self._expert_sizes()]
        own_groups = own.tp_size, own.expert_size
        if own.expert_size > 1 and own_groups not in groups:
            groups.append(own_groups)
        for stage, (tp_size, expert_size) in product(stages, groups):
            for recomputation in RECOMPUTATIONS:
                yield Choice(stage, tp_size, *recomputation, expert_size)

    def _expert_sizes(self) -> list[int]:
        """How many ranks of a node may share the experts of the run's base."""
        sizes: list[int] = []
        if self.spec.mixture is None or not isinstance(
            training_method(self.config), FrozenBaseMethod
        ):
            return sizes
        largest = min(self.cluster.gpus, self.cluster.gpus_per_node)
        for size in TP_SIZES:
            divides = self.spec.mixture.experts % size == 0 and self.cluster.gpus % size == 0
            if 1 < size <= largest and divides:
                sizes.append(size)
        return sizes

    def estimate_all(self, *, every: bool = False) -> tuple[list[Estimate], dict[str, str]]:
        """The estimates of all layouts, and by the sizes of groups why others are impossible.

        Recomputing more costs time and nothing else. Unless `every` one is wanted, a layout is left
        out if it fits with less recomputation, which also saves running its micro-batch.
        """
        estimates: list[Estimate] = []
        refused: dict[str, str] = {}
        fitting: set[tuple[int, int, int]] = set()
        choices = sorted(self.all_choices(), key=_recomputation)  # the least recomputation first
        for choice in counted(choices, "estimating", len(choices), " layouts"):
            place = choice.zero_stage, choice.tp_size, choice.expert_size
            if place in fitting and choice != self.own_choice and not every:
                continue
            try:
                estimate = self.estimate(choice)
            except UserError as error:
                refused[choice.groups] = str(error)
                continue
            estimates.append(estimate)
            if estimate.is_safe(self.cluster):
                fitting.add(place)
        return sorted(estimates, key=_place), refused

    def worth_a_row(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """One estimate for each ZeRO stage and size of groups, and the run's own.

        It is the one with the most recomputation: those with less do not fit.
        """
        wanted = {self.own_choice}
        last: dict[tuple[int, int, int], Choice] = {}
        for estimate in estimates:
            choice = estimate.choice
            last[choice.zero_stage, choice.tp_size, choice.expert_size] = choice
        wanted.update(last.values())
        return [estimate for estimate in estimates if estimate.choice in wanted]

    def _micro_batch(self, choice: Choice) -> tuple[DeepSpeedConfig, MicroBatchCosts]:
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
        """How long the steps of the whole run take on the layout `choice`, without anything else.

        Raises:
            UserError: as `estimate`.
        """
        seconds = 0.0
        for estimator in self.stages:
            seconds += estimator.stage.steps * estimator.estimate(choice).step_s
        return seconds


def parameters_of(config: RunConfig, spec: DecoderSpec) -> Parameters:
    """The parameters of a run's model, by what becomes of them; built without memory."""
    with torch.device("meta"):
        model = training_method(config).build(spec, SINGLE, "none")
        base: nn.Module
        if isinstance(model, HostedDecoder):
            base = model.base
        else:
            base = Decoder(replace(spec, new_tokens=0))
        return count_parameters(model, base, with_muon=config.schedule.optimizer == "muon")


def estimator_of(
    config: RunConfig, spec: DecoderSpec, deepspeed: DeepSpeedConfig, cluster: Cluster
) -> Estimator:
    """The estimator of a run; in a run of several stages, of that which takes the most memory.

    Its `stages` are the estimators of all stages.
    """
    stages: list[Estimator] = []
    for stage in training_stages(config):
        stages.append(Estimator(config, spec, deepspeed, cluster, stage))
    largest = stages[0]
    if len(stages) > 1:
        # What is impossible is so in every stage, and is reported where it is estimated.
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

    Messages of tensor parallelism and of experts over ranks block the computation, as Muon's do.
    Those of ZeRO-2 and 3 overlap with it where `overlap_comm` is set; ZeRO-1 sends after the
    backward pass, as ZeRO-2 gathers after the update.
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
    # Where messages overlap with the computation, the longer of the two decides.
    return max(blocking, gather_and_reduce)


def open_estimator(
    config: RunConfig, cluster: Cluster, *, base_config: Path | None = None
) -> Estimator:
    """Reads the run's base and DeepSpeed file.

    `base_config` is the base's config.json, for a base whose folder is missing.

    Raises:
        ConfigError: the DeepSpeed file is invalid for the layout or the run.
        BaseModelError: neither the base's folder nor `base_config` exists.
        LayoutError: the number of GPUs does not divide by the tensor-parallel size, or what remains
            by the number of ranks that share experts.
        DataError: the extended vocabulary is missing, or of another base.
    """
    source = base_config or config.base
    if not source.exists():
        raise BaseModelError(
            f"{source}: no such file or folder; the base's config.json is enough: "
            "name it with --base-config"
        )
    parallel = config.parallel
    layout = Layout(cluster.gpus, parallel.tp_size, parallel.expert_size)
    deepspeed = deepspeed_config_of(config, layout)
    spec = read_spec(source, config.base_code)
    return estimator_of(config, extended_spec(config, spec), deepspeed, cluster)


def recommend(estimates: Sequence[Estimate], cluster: Cluster) -> tuple[Choice | None, str]:
    """The fastest layout that fits even if its estimate is wrong by MEMORY_ERROR, and the reason.

    Among equally fast ones it is the one with the smallest tensor-parallel size, then the least
    recomputation, then the lowest ZeRO stage. None if none fits.
    """
    if not estimates:
        return None, "no layout is possible; see the reasons given for each"
    safe = [estimate for estimate in estimates if estimate.is_safe(cluster)]
    if not safe:
        return None, _nothing_fits(estimates, cluster)

    fastest = min(estimate.step_s for estimate in safe)
    # Not the single fastest: differences below the estimate's error would choose a more complicated
    # layout at random.
    equally_fast = [one for one in safe if one.step_s <= fastest * (1 + _TOLERANCE)]
    best = min(equally_fast, key=_effort)
    reasons = [
        f"{_gib(best)} of {_usable_gib(cluster)} usable GiB, {best.step_s:.2f} s a step",
    ]
    simpler = []
    for other in estimates:
        if _effort(other) < _effort(best) and not other.is_safe(cluster):
            simpler.append(other)
    if simpler:
        nearest = _smallest(simpler)
        reasons.append(f"{nearest.choice} would need {_gib(nearest)} GiB")
    if best.choice.zero_stage < 3:
        sharded = best.choice._replace(zero_stage=3)
        for other in estimates:
            if other.choice == sharded:
                more_gb = (other.sent_bytes - best.sent_bytes) / 1e9
                reasons.append(
                    f"ZeRO-3 would send {more_gb:.1f} GB more a step to gather a base that fits"
                )
    return best.choice, "; ".join(reasons)


def _nothing_fits(estimates: Sequence[Estimate], cluster: Cluster) -> str:
    """Why no layout is recommended."""
    least = _smallest(estimates)
    reason = (
        f"nothing fits: {least.choice} needs {_gib(least)} GiB of the usable {_usable_gib(cluster)}"
    )
    if least.fits(cluster):
        reason += f", which leaves less than the {MEMORY_ERROR:.0%} that it may be wrong by"
    return (
        f"{reason}; take more GPUs, a smaller schedule.micro_batch_size, "
        "or ds_configs/zero3_offload.json"
    )


def _smallest(estimates: Sequence[Estimate]) -> Estimate:
    """The one that takes the least memory."""
    return min(estimates, key=lambda estimate: estimate.memory.total)


def _recomputation(choice: Choice) -> int:
    """A number that rises with what is recomputed."""
    return RECOMPUTATIONS.index((choice.activation_checkpointing, choice.kept_results))


def _effort(estimate: Estimate) -> tuple[int, int, int]:
    """How far a layout is from the simplest one."""
    choice = estimate.choice
    return choice.tp_size * choice.expert_size, _recomputation(choice), choice.zero_stage


def _place(estimate: Estimate) -> tuple[int, int, int, int]:
    """The order of a table."""
    choice = estimate.choice
    return choice.zero_stage, choice.tp_size, choice.expert_size, _recomputation(choice)


def _gib(estimate: Estimate) -> str:
    return f"{estimate.memory.total / GIB:.1f}"


def _usable_gib(cluster: Cluster) -> str:
    return f"{cluster.usable_bytes / GIB:.0f}"


# --- The report -----------------------------------------------------------------------------------


def report(estimator: Estimator, *, every: bool = False) -> tuple[str, Choice | None]:
    """The report of an estimate, and the recommended layout if there is one.

    Its sections are the model, a table of layouts, the time of the run's own layout and of the
    recommended one, and the recommendation. `every` layout is listed, those too that recompute more
    than they must.
    """
    estimates, refused = estimator.estimate_all(every=every)
    recommended, reason = recommend(estimates, estimator.cluster)
    shown = estimates if every else estimator.worth_a_row(estimates)
    sections = [
        _model_section(estimator),
        _layouts_section(shown, refused, estimator.cluster),
        _times_section(estimates, refused, recommended, estimator),
        _wrapped(f"recommended: {recommended or 'no layout'}: {reason}"),
    ]
    return "\n\n".join(sections), recommended


def report_values(
    estimator: Estimator, *, every: bool = False
) -> tuple[dict[str, Any], Choice | None]:
    """What a report says, for programs (docs/json.md), and the recommended layout if there is one.

    All layouts that were estimated are listed.
    """
    cluster = estimator.cluster
    estimates, refused = estimator.estimate_all(every=every)
    recommended, reason = recommend(estimates, cluster)
    served = estimator.served_flops()
    values = {
        "run": estimator.config.name,
        "parameters": asdict(estimator.parameters),
        "flops_per_token": estimator.flops_per_token("none", "nothing").total,
        "served_flops_per_token": None if served is None else asdict(served),
        "tokens_per_step": estimator.tokens_per_step,
        "steps": estimator.config.schedule.steps,
        "stage": estimator.stage.name or None,
        "cluster": asdict(cluster),
        "usable_bytes": round(cluster.usable_bytes),
        "layouts": [layout_values(estimate, estimator) for estimate in estimates],
        "refused": refused,
        "own": estimator.own_choice._asdict(),
        "recommended": None if recommended is None else recommended._asdict(),
        "reason": reason,
    }
    return values, recommended


def layout_values(estimate: Estimate, estimator: Estimator) -> dict[str, Any]:
    """The estimate of one layout, for programs."""
    cluster = estimator.cluster
    step_s = estimate.step_s
    return {
        **estimate.choice._asdict(),
        "memory_bytes": asdict(estimate.memory),
        "total_bytes": estimate.memory.total,
        "host_bytes": estimate.host_bytes,
        "fits": _fits(estimate, cluster),
        "micro_batches": estimate.micro_batches,
        "inside_node_bytes": estimate.inside_bytes,
        "between_nodes_bytes": estimate.between_bytes,
        "compute_s": estimate.compute_s,
        "step_s": step_s,
        "tokens_per_second_per_gpu": estimator.tokens_per_step / step_s / cluster.gpus,
        "hours": estimator.run_seconds(estimate.choice) / 3600,
    }


def _fits(estimate: Estimate, cluster: Cluster) -> str:
    """Whether a layout fits: `yes`, `tight` within the error of the estimate, or `no`."""
    if estimate.is_safe(cluster):
        return "yes"
    return "tight" if estimate.fits(cluster) else "no"


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, _COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _model_section(estimator: Estimator) -> str:
    """The model, its FLOPs, the batch and the cluster; a label and a text in each line."""
    cluster = estimator.cluster
    config = estimator.config
    flops = estimator.flops_per_token("none", "nothing")
    lines = [
        ("parameters", str(estimator.parameters)),
        ("state", _training_state(estimator)),
        (
            "FLOPs",
            f"{flops.total / 1e9:.2f} G a token ({flops.matrix / 1e9:.2f} matrix products, "
            f"{flops.attention / 1e9:.2f} attention)",
        ),
        (
            "batch",
            f"{estimator.tokens_per_step:,} tokens a step, {estimator.stage.steps:,} steps",
        ),
        (
            "cluster",
            f"{cluster.gpus} GPUs on {cluster.nodes} node(s), {_usable_gib(cluster)} usable of "
            f"{cluster.gpu_memory_gib:.0f} GiB, {cluster.peak_tflops:.0f} TFLOP/s "
            f"at MFU {cluster.mfu:.2f}",
        ),
    ]
    if len(estimator.stages) > 1:
        stages = f"of {len(estimator.stages)}, {estimator.stage}, takes the most memory"
        lines.insert(2, ("stage", f"{stages}; parameters, state and hours are of the whole run"))
    served = estimator.served_flops()
    if served is not None:
        lines.append(
            (
                "served",
                f"{served.closed / 1e9:.2f} G FLOPs a token where the gate stays shut, "
                f"{served.open / 1e9:.2f} G where it is open "
                f"({served.open / served.closed:.2f} times the base's)",
            )
        )
    if isinstance(config.method, ScaleMethod):
        spec = estimator.spec
        plan = plan_expansion(config.method, spec.widths, spec.num_layers)
        if merged_unsupported_reason(plan, spec, gated=False) is None:
            assert plan.expansion is not None, "SCALE widens its base"
            serving = describe_serving(plan.expansion, spec)
            lines.append(("serving", f"a merged export: {serving}"))
    return "\n".join(_wrapped(f"{label:<10}  {text}") for label, text in lines)


def _training_state(estimator: Estimator) -> str:
    """What training holds of each trained parameter, which is the price of a method."""
    parameters = estimator.parameters
    size = training_state_bytes(parameters, estimator.deepspeed.dtype)
    each = size / max(1, parameters.trained)
    return (
        f"{size / GIB:.2f} GiB over all ranks, {each:.1f} bytes a trained parameter: weight, "
        "gradient, fp32 copy and moments"
    )


_LAYOUT_COLUMNS = (
    ("ZeRO", ">4"),
    ("tp", ">3"),
    ("ep", ">3"),
    ("checkpointing", "<13"),
    ("keeps", "<9"),
    ("weights", ">7"),
    ("states", ">7"),
    ("activ.", ">6"),
    ("other", ">5"),
    ("total", ">7"),
    ("fits", ">5"),
    ("node GB", ">8"),
    ("net GB", ">7"),
    ("s/step", ">7"),
)
"""Heads of the table of layouts, with alignment and width. `ep`, how many ranks share experts, is
left out of tables where none do."""


def _layouts_section(
    estimates: Sequence[Estimate], refused: dict[str, str], cluster: Cluster
) -> str:
    """A table of layouts, memory in GiB and traffic in GB; and why others are impossible."""
    rows = [[head for head, _ in _LAYOUT_COLUMNS]]
    for estimate in estimates:
        rows.append(_layout_cells(estimate, cluster))
    with_experts = any(estimate.choice.expert_size > 1 for estimate in estimates)
    lines = [_layout_line(row, with_experts=with_experts) for row in rows]
    for groups, reason in refused.items():
        lines.append(_wrapped(f"  not tp {groups}: {reason}"))
    return "\n".join(lines)


def _layout_line(cells: Sequence[str], *, with_experts: bool) -> str:
    aligned = []
    for text, (head, form) in zip(cells, _LAYOUT_COLUMNS, strict=True):
        if head != "ep" or with_experts:
            aligned.append(format(text, form))
    return " ".join(aligned)


def _layout_cells(estimate: Estimate, cluster: Cluster) -> list[str]:
    """One row: the larger kinds of memory have columns, all others share one."""
    choice = estimate.choice
    memory = estimate.memory
    states = memory.gradients + memory.optimizer
    other = memory.total - memory.weights - states - memory.activations
    return [
        str(choice.zero_stage),
        str(choice.tp_size),
        str(choice.expert_size),
        choice.activation_checkpointing,
        "-" if choice.activation_checkpointing == "none" else choice.kept_results,
        f"{memory.weights / GIB:.2f}",
        f"{states / GIB:.2f}",
        f"{memory.activations / GIB:.2f}",
        f"{other / GIB:.2f}",
        f"{memory.total / GIB:.2f}",
        _fits(estimate, cluster),
        f"{estimate.inside_bytes / 1e9:.1f}",
        f"{estimate.between_bytes / 1e9:.1f}",
        f"{estimate.step_s:.2f}",
    ]


def _times_section(
    estimates: Sequence[Estimate],
    refused: dict[str, str],
    recommended: Choice | None,
    estimator: Estimator,
) -> str:
    """The run's own layout and the recommended one in full."""
    own = estimator.own_choice
    lines = []
    for estimate in estimates:
        if estimate.choice == own == recommended:
            lines.append(_times_of(estimate, "this run's, recommended", estimator))
        elif estimate.choice == own:
            lines.append(_times_of(estimate, "this run's", estimator))
        elif estimate.choice == recommended:
            lines.append(_times_of(estimate, "recommended", estimator))
    if own.groups in refused:
        lines.append(f"{own} (this run's): IMPOSSIBLE, for the reason above")
    return "\n".join(_wrapped(line) for line in lines)


def _times_of(estimate: Estimate, whose: str, estimator: Estimator) -> str:
    """The time of a step and of the run on one layout, and its memory by kind."""
    cluster = estimator.cluster
    step_s = estimate.step_s
    warning = ""
    if not estimate.fits(cluster):
        warning = f"DOES NOT FIT, it needs {_gib(estimate)} of {_usable_gib(cluster)} usable GiB: "
    elif not estimate.is_safe(cluster):
        warning = (
            f"TIGHT, less than {MEMORY_ERROR:.0%} of {_usable_gib(cluster)} usable GiB are left: "
        )
    tokens_per_second_per_gpu = estimator.tokens_per_step / step_s / cluster.gpus
    hours = estimator.run_seconds(estimate.choice) / 3600
    on_host = ""
    if estimate.host_bytes:
        on_host = f", {estimate.host_bytes / GIB:.2f} GiB a GPU in host memory"
    kinds = []
    for kind in fields(Memory):
        kinds.append(f"{kind.name} {getattr(estimate.memory, kind.name) / GIB:.2f}")
    return (
        f"{estimate.choice} ({whose}): {warning}{estimate.micro_batches} micro-batches a step, "
        f"{step_s:.2f} s ({estimate.compute_s:.2f} computing), "
        f"{tokens_per_second_per_gpu:,.0f} tokens/s a GPU, {hours:.1f} h{on_host}; "
        f"GiB: {', '.join(kinds)}"
    )
