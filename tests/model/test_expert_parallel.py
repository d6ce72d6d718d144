"""A mixture whose experts data-parallel ranks share computes what it computes on one: each rank, for
tokens of its own, loss and every trained gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import LayoutError
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.parallel.expert_rows import rows_of_held_experts
from pipeline.parallel.parameters import named_trained_parameters, partition_of
from pipeline.parallel.sharding import Partition, merge
from pipeline.parallel.topology import (
    SINGLE,
    ExpertParallel,
    Layout,
    ProcessGroups,
    TensorParallel,
)
from tests.distributed import run_ranks
from tests.model.test_tensor_parallel import BOTH, Case
from tests.tolerances import assert_near, rounding_of
from tests.widened import some_batch, trained_gradients, unwidened


@dataclass(frozen=True)
class SharedCase:
    """A model whose experts `layout` shares. With `skewed` no token takes any of the last rank's."""

    layout: Layout
    case: Case
    padded: bool = False
    skewed: bool = False

    def __str__(self) -> str:
        layout = f"{self.layout.world_size} tp {self.layout.tp_size} ep {self.layout.expert_size}"
        flags = [name for name in ("padded", "skewed") if getattr(self, name)]
        return " ".join((layout, str(self.case), *flags))

    def build(self, path: Path, tp: TensorParallel) -> Decoder:
        model = self.case.build(path, tp)
        for mixture in model.mixtures:
            bias = mixture.router.bias
            if self.skewed:
                assert bias is not None, "a bias for the choice alone skews it"
                with torch.no_grad():
                    bias[0, : -(bias.shape[1] // self.layout.expert_size)] += 100
        return model


@dataclass(frozen=True)
class Seen:
    """What a rank, or one process, computed of the tokens of data-parallel rank `dp_rank`."""

    dp_rank: int
    loss: Tensor
    nll: Tensor
    base_is_model: bool
    gradients: dict[str, Tensor]
    partitions: dict[str, Partition] = field(default_factory=dict)
    held_rows: list[int] = field(default_factory=list)


def seen(shared: SharedCase, path: Path, tp: TensorParallel, dp_rank: int) -> Seen:
    model = shared.build(path, tp)
    held_rows: list[int] = []
    for mixture in model.mixtures:
        mixture.experts.gate.register_forward_hook(
            lambda _, taken, made: held_rows.append(int(taken[1][-1]))
        )
    tokens, targets = some_batch(model.spec, 2, 24, seed=10 * dp_rank)
    kl_sequences = int(shared.case.uses_kl)
    losses = model(tokens, targets, None, None, kl_sequences, kl_sequences)
    losses.total.backward()
    with torch.no_grad():
        preserved, base = (
            model.hidden_states(tokens, path=path).x for path in ("preserved", "base")
        )
    return Seen(
        dp_rank,
        losses.total.detach(),
        losses.nll,
        torch.equal(preserved, base),
        trained_gradients(model),
        {name: partition_of(parameter) for name, parameter in named_trained_parameters(model)},
        held_rows,
    )


def seen_by_rank(cases: list[tuple[SharedCase, Path]]) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for shared, path in cases:
        groups = ProcessGroups(shared.layout, padded_experts=shared.padded)
        dp_rank = groups.layout.dp_rank(dist.get_rank())
        found[str(shared)] = seen(shared, path, groups.tensor_parallel, dp_rank)
    return found


ADAPT = Case("qwen3_moe", "adapt", BOTH)
MIXTRAL = Case("mixtral", "adapt", BOTH)  # of four experts a token takes three
TWO = Layout(2, 1, 2)
QUICK = SharedCase(TWO, MIXTRAL, padded=True)
OF_TWO = [
    SharedCase(TWO, replace(ADAPT, activation_checkpointing="all", uses_kl=True)),
    SharedCase(TWO, replace(ADAPT, precision="fp8", activation_checkpointing="all"), padded=True),
    SharedCase(TWO, Case("qwen3_moe dense layer", "preserve", {"norm": "base"})),
    SharedCase(TWO, Case("qwen2_moe", "route", BOTH, "all", kept_results="products")),
    SharedCase(TWO, Case("exaone_moe", "lora", {"rank": 4}), padded=True),
    *(
        SharedCase(TWO, Case("glm4_moe", method, changes), padded, skewed=True)
        for method, changes in (("preserve", {}), ("adapt", BOTH))
        for padded in (False, True)
    ),
]
OF_FOUR = [
    SharedCase(Layout(4, 1, 2), ADAPT),
    SharedCase(Layout(4, 1, 4), MIXTRAL),
    SharedCase(Layout(4, 1, 4), replace(MIXTRAL, activation_checkpointing="all"), padded=True),
    SharedCase(Layout(4, 2, 2), replace(ADAPT, sequence_parallel=True)),
    SharedCase(Layout(4, 2, 2), Case("qwen2_moe", "adapt", BOTH, precision="fp8"), padded=True),
]


def check(shared: SharedCase, path: Path, ranks: list[Seen]) -> None:
    """Compares what the ranks computed with one process."""
    base = open_base(path)
    bound = rounding_of(base.spec)
    bound_of_gradients = rounding_of(base.spec, backward=True)
    tp_size = shared.layout.tp_size
    for first in range(0, len(ranks), tp_size):
        of_tokens = ranks[first : first + tp_size]
        whole = seen(shared, path, SINGLE, of_tokens[0].dp_rank)
        for rank in of_tokens:
            assert_near(rank.loss, whole.loss, bound, "loss")
            assert_near(rank.nll, whole.nll, bound, "nll")
            assert rank.base_is_model
        for name, expected in whole.gradients.items():
            partition = of_tokens[0].partitions[name]
            size = 0 if partition.dim is None else expected.shape[partition.dim]
            found = merge([rank.gradients[name] for rank in of_tokens], partition, size)
            assert expected.any(), f"{name} is not reached"
            assert_near(found, expected, bound_of_gradients, name)
    if shared.skewed:
        assert sum(ranks[-1].held_rows) == 0 < sum(ranks[0].held_rows)


def test_a_rank_computes_what_one_process_computes(base):
    path = base(QUICK.case.base).path
    ranks = run_ranks(seen_by_rank, 2, [(QUICK, path)])
    check(QUICK, path, [rank[str(QUICK)] for rank in ranks])


@pytest.fixture(scope="module")
def of_ranks(base):
    """What the ranks saw of every case, computed by one start of so many ranks."""
    known: dict[int, list[dict[str, Seen]]] = {}

    def of(shared: SharedCase) -> list[Seen]:
        world_size = shared.layout.world_size
        if world_size not in known:
            cases = OF_TWO if world_size == 2 else OF_FOUR
            paths = [(each, base(each.case.base).path) for each in cases]
            known[world_size] = run_ranks(seen_by_rank, world_size, paths)
        return [rank[str(shared)] for rank in known[world_size]]

    return of


@pytest.mark.full
@pytest.mark.parametrize("shared", [*OF_TWO, *OF_FOUR], ids=str)
def test_every_layout_computes_what_one_process_computes(base, of_ranks, shared):
    check(shared, base(shared.case.base).path, of_ranks(shared))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("skew", [0.0, 5.0])
def test_each_row_is_of_one_rank(padded, skew):
    """Whatever the router chooses, the ranks' rows together are all rows, each of its own expert."""
    experts, top_k, tokens, size = 8, 3, 50, 4
    preference = torch.linspace(skew, 0, experts)
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1)) + preference
    chosen = scores.topk(top_k, dim=1).indices
    reached = torch.zeros(tokens, top_k, dtype=torch.int64)
    for rank in range(size):
        held = experts // size
        rows = rows_of_held_experts(chosen, experts, ExpertParallel(rank, size, padded=padded))
        unread = len(rows.order) - 1
        assert padded == (unread == tokens * min(top_k, held)) or unread == rows.ends[-1]
        first = 0
        for expert, stop in enumerate(rows.ends.tolist(), start=rank * held):
            assert (chosen.flatten()[rows.order[first:stop]] == expert).all()
            first = stop
        assert rows.is_held.tolist() == [row < first for row in range(unread + 1)]
        mine = rows.places != unread
        assert (rows.places[mine] < first).all() and int(mine.sum()) == first
        of_pair = torch.arange(tokens * top_k).view(tokens, top_k)
        assert torch.equal(rows.order[rows.places[mine]], of_pair[mine])
        assert torch.equal(rows.tokens, rows.order // top_k)
        reached += mine
    assert (reached == 1).all()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_rank_reads_its_own_experts_alone(base, tp_size):
    folder = base("qwen3_moe")
    whole = dict(unwidened(folder).named_parameters())
    for rank, expert_rank in ((0, 0), (tp_size - 1, 1), (0, 2)):
        tp = TensorParallel(rank, tp_size, expert_parallel=ExpertParallel(expert_rank, 3))
        model = Decoder(folder.spec, tp=tp)
        load_base(model, folder, tp)
        for name, parameter in model.named_parameters():
            partition = partition_of(parameter)
            expected = whole[name]
            if ".experts." in name:
                expected = expected[2 * expert_rank : 2 * expert_rank + 2]
            if partition.dim is not None and tp_size > 1:
                size = expected.shape[partition.dim]
                first, stop = partition.bounds(size, rank, tp_size)
                held = min(stop, size) - first
                expected = expected.narrow(partition.dim, first, held)
                parameter = parameter.narrow(partition.dim, 0, held)
            assert torch.equal(parameter, expected), name


@pytest.mark.parametrize(
    ("name", "size", "fault"),
    [
        ("llama", 2, r"expert_size: expected 1 with a base without experts .*llama.* remove it"),
        ("qwen3_moe", 4, r"expert_size: expected a divisor of the base's 6 experts, found 4"),
    ],
)
def test_a_base_whose_experts_cannot_be_shared_is_refused(base, name, size, fault):
    tp = TensorParallel(expert_parallel=ExpertParallel(0, size))
    with pytest.raises(LayoutError, match=fault):
        Decoder(base(name).spec, tp=tp)
