"""The layouts on which a run may train: ZeRO stage, groups of ranks, and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from pipeline.config.run import RunConfig
from pipeline.deepspeed_config import zero3_unsupported_reason
from pipeline.methods.registry import training_method
from pipeline.methods.scale import FrozenBaseMethod
from pipeline.model.causal_decoder import ActivationCheckpointing
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import Cluster

RECOMPUTATIONS: tuple[tuple[ActivationCheckpointing, KeptResults], ...] = (
    ("none", "nothing"),
    ("collaborative", "products"),
    ("all", "products"),
    ("collaborative", "attention"),
    ("collaborative", "nothing"),
    ("all", "attention"),
    ("all", "nothing"),
)
"""Which layers are recomputed, and what they keep; roughly from the least time to the least
memory."""
GROUP_SIZES = (1, 2, 4, 8)
"""Sizes that are compared, of tensor-parallel groups and of groups that share experts."""


class Place(NamedTuple):
    """What remains of a `Choice` without recomputation."""

    zero_stage: int
    tp_size: int
    expert_size: int


class Choice(NamedTuple):
    """A layout that a run may have.

    Attributes:
        zero_stage: 1, 2 or 3.
        tp_size: the tensor-parallel size.
        activation_checkpointing: which layers are recomputed.
        kept_results: what recomputed layers keep.
        expert_size: how many ranks share the experts of a mixture.
    """

    zero_stage: int
    tp_size: int
    activation_checkpointing: ActivationCheckpointing
    kept_results: KeptResults = "nothing"
    expert_size: int = 1

    def layout(self, gpus: int) -> Layout:
        """The layout of the ranks on so many GPUs.

        Raises:
            LayoutError: the sizes of groups do not divide the number of GPUs.
        """
        return Layout(gpus, self.tp_size, self.expert_size)

    @property
    def place(self) -> Place:
        """The layout apart from its recomputation."""
        return Place(self.zero_stage, self.tp_size, self.expert_size)

    @property
    def groups(self) -> str:
        """The tensor-parallel size, and the number of ranks that share experts, if several do."""
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


def recomputation_rank(choice: Choice) -> int:
    """The place in RECOMPUTATIONS: higher where more is recomputed."""
    return RECOMPUTATIONS.index((choice.activation_checkpointing, choice.kept_results))


def layouts_to_compare(
    config: RunConfig, spec: DecoderSpec, cluster: Cluster, own: Choice
) -> list[Choice]:
    """Every layout worth comparing for a run, and the run's `own`.

    Tensor parallelism stays inside a node. Groups that share experts are compared as an alternative
    to it, not in combination.
    """
    zero_stages: Sequence[int] = (1, 2, 3)
    if zero3_unsupported_reason(config) is not None:
        zero_stages = (1, 2)
    return [
        *_tensor_parallel_layouts(spec, cluster, own, zero_stages),
        *_expert_parallel_layouts(config, spec, cluster, own, zero_stages),
    ]


def _tensor_parallel_layouts(
    spec: DecoderSpec, cluster: Cluster, own: Choice, zero_stages: Sequence[int]
) -> list[Choice]:
    recomputations = list(RECOMPUTATIONS)
    if not spec.is_native:
        # Layers of transformers keep nothing where they are recomputed.
        recomputations = [one for one in RECOMPUTATIONS if one[1] == "nothing"]
    tp_sizes = {own.tp_size}
    for size in GROUP_SIZES:
        if size <= _ranks_of_node(cluster):
            tp_sizes.add(size)

    layouts: list[Choice] = []
    for stage, tp_size, recomputation in product(zero_stages, sorted(tp_sizes), recomputations):
        layout = Choice(stage, tp_size, *recomputation)
        # With a single replica of the model ZeRO has nothing to partition: its stages are equal.
        has_replicas = tp_size < cluster.gpus
        if stage == 1 or has_replicas or layout == own:
            layouts.append(layout)
    return layouts


def _expert_parallel_layouts(
    config: RunConfig,
    spec: DecoderSpec,
    cluster: Cluster,
    own: Choice,
    zero_stages: Sequence[int],
) -> list[Choice]:
    groups = [(1, expert_size) for expert_size in _expert_sizes(config, spec, cluster)]
    own_groups = own.tp_size, own.expert_size
    if own.expert_size > 1 and own_groups not in groups:
        groups.append(own_groups)
    layouts: list[Choice] = []
    for stage, (tp_size, expert_size) in product(zero_stages, groups):
        for recomputation in RECOMPUTATIONS:
            layouts.append(Choice(stage, tp_size, *recomputation, expert_size))
    return layouts


def _expert_sizes(config: RunConfig, spec: DecoderSpec, cluster: Cluster) -> list[int]:
    """How many ranks of a node may share the experts of the run's base."""
    has_frozen_experts = isinstance(training_method(config), FrozenBaseMethod)
    if spec.mixture is None or not has_frozen_experts:
        return []
    sizes: list[int] = []
    for size in GROUP_SIZES:
        divides = spec.mixture.experts % size == 0 and cluster.gpus % size == 0
        if 1 < size <= _ranks_of_node(cluster) and divides:
            sizes.append(size)
    return sizes


def _ranks_of_node(cluster: Cluster) -> int:
    return min(cluster.gpus, cluster.gpus_per_node)
