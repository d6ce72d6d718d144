"""The decoder over several ranks computes what it computes on one: logits, loss and every trained
gradient.

Splitting a sum over ranks only reorders it, so results may differ by roundings
(tests/tolerances.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from pipeline.config.method import Method, starts_from_expansion
from pipeline.model.causal_decoder import LogitsPath
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, load_new_tokens, open_base
from pipeline.model.recomputation import KeptResults
from pipeline.parallel.cross_entropy import greedy_choices_
from pipeline.parallel.parameters import named_trained_parameters, partition_of
from pipeline.parallel.quantized import QuantizedPrecision
from pipeline.parallel.sharding import Partition, merge
from pipeline.parallel.topology import SINGLE, TensorParallel
from tests.distributed import all_ranks, run_ranks
from tests.model.test_new_tokens import batch_with_new_tokens, extended
from tests.tolerances import assert_near, rounding_of
from tests.widened import (
    balance_router,
    scale_settings,
    shake,
    some_batch,
    some_tokens,
    started,
    trained_gradients,
    two_documents,
    unwidened,
    widened,
)

BOTH = {"collaborative_modules": "both"}
ONE_KV_HEAD = {"expansion": {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 2}}
ONE_KV_HEAD_IN_FOUR = {
    "expansion": {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 4}
}


@dataclass(frozen=True)
class Case:
    """A model to run on several ranks."""

    base: str
    method: str
    changes: dict[str, Any] = field(default_factory=dict)
    activation_checkpointing: str = "none"
    sequence_parallel: bool = False
    documents: bool = False
    uses_kl: bool = False
    new_tokens: bool = False
    precision: QuantizedPrecision | None = None
    kept_results: KeptResults = "nothing"

    def __str__(self) -> str:
        flags = [
            name
            for name in ("sequence_parallel", "documents", "uses_kl", "new_tokens")
            if getattr(self, name)
        ]
        return " ".join(
            (
                self.base,
                self.method,
                *self.changes,
                self.activation_checkpointing,
                *flags,
                self.precision or "",
                self.kept_results,
            )
        )

    def build(self, path: Path, tp: TensorParallel) -> Decoder:
        """The model, all of its trained part away from zero. The router's threshold is that of the
        whole model."""
        model = self._build(path, tp)
        model.kept_results = self.kept_results
        return model

    def _build(self, path: Path, tp: TensorParallel) -> Decoder:
        tp = replace(tp, sequence_parallel=self.sequence_parallel and tp.size > 1)
        base = extended(open_base(path)) if self.new_tokens else open_base(path)
        if self.method not in ("preserve", "adapt", "route"):
            settings = TypeAdapter(Method).validate_python({"name": self.method, **self.changes})
            if starts_from_expansion(settings):
                return widened(base, settings, tp=tp, noise=0.05, precision=self.precision)
            model = started(base, settings, tp, self.precision)
            shake(model, 0.05)
            if self.uses_kl and not model.keeps_base:
                model.add_reference()
                load_base(model.reference, base, tp)
                load_new_tokens(model.reference, base, tp, None)
            return model
        settings = scale_settings(self.method, **self.changes)

        def build(tp: TensorParallel) -> Decoder:
            form = {
                "activation_checkpointing": self.activation_checkpointing,
                "precision": self.precision,
            }
            return widened(base, settings, tp=tp, noise=0.1, **form)

        model = build(tp)
        if self.method == "route":
            whole = build(SINGLE)
            balance_router(whole, some_tokens(base.spec, 2, 24))
            model.output.threshold = whole.output.threshold
        return model


@dataclass(frozen=True)
class Outcome:
    """What one rank, or the only one, computed of a batch."""

    logits: dict[str, Tensor]
    loss: Tensor
    nll: Tensor
    kl: Tensor
    preserved: Tensor
    places: Tensor
    """Of each token, its column over all ranks: those of new rows lie behind each rank's others."""
    greedy: Tensor
    """For each token, the column of the largest logit."""
    gradients: dict[str, Tensor]
    partitions: dict[str, Partition]
    squared_norm: float
    """Of the gradients that this rank counts in the global norm, by DeepSpeed's rule."""


def outcome(model: Decoder, case: Case) -> Outcome:
    tokens, targets = (
        batch_with_new_tokens(model) if case.new_tokens else some_batch(model.spec, 2, 24)
    )
    positions, documents = two_documents(tokens) if case.documents else (None, None)
    losses = model(tokens, targets, positions, documents, int(case.uses_kl), int(case.uses_kl))
    losses.total.backward()
    parameters = dict(named_trained_parameters(model))
    gradients = trained_gradients(model)
    counted = [
        name for name in parameters if model.tp.rank == 0 or parameters[name].tensor_model_parallel
    ]
    with torch.no_grad():
        hidden = model.hidden_states(tokens, positions, documents)
        greedy = greedy_choices_(model.output.logits(hidden), **model.output.vocabulary.range)
    return Outcome(
        logits={
            path: model.logits(tokens, positions, documents, path=path)
            for path in get_args(LogitsPath)
        },
        loss=losses.total.detach(),
        nll=losses.nll,
        kl=losses.kl,
        preserved=losses.preserved,
        places=model.output.vocabulary.columns_of(
            torch.arange(model.spec.vocab_size + model.spec.new_tokens)
        ),
        greedy=greedy,
        gradients=gradients,
        partitions={name: partition_of(parameter) for name, parameter in parameters.items()},
        squared_norm=sum(float(gradients[name].double().square().sum()) for name in counted),
    )


def outcomes_of_rank(cases: list[tuple[Case, Path]]) -> dict[str, Outcome]:
    tp = all_ranks()
    return {str(case): outcome(case.build(path, tp), case) for case, path in cases}


EVERY_METHOD = [
    Case(base, method, BOTH if method in ("adapt", "route") else {})
    for base in ("llama", "neox")
    for method in ("preserve", "adapt", "route", "fft")
]
WITH_KL = [
    Case("llama", "preserve", uses_kl=True, sequence_parallel=True),
    Case("neox", "adapt", BOTH, uses_kl=True, documents=True),
    Case("llama tied", "route", BOTH, uses_kl=True),
    Case("llama", "adapt", BOTH, "all", uses_kl=True, sequence_parallel=True, documents=True),
    Case("llama tied", "fft", uses_kl=True, sequence_parallel=True),
    Case("neox", "lora", {"rank": 4}, uses_kl=True),
]
FEATURED = [
    Case("qwen3", "route", BOTH),
    Case("qwen3", "adapt", {"norm": "base"}, documents=True),
    Case("phi3", "lora", {"rank": 4}),
    Case("mistral window", "adapt", BOTH, documents=True),
    Case("ministral", "route", BOTH, documents=True),
    Case("gemma2", "adapt", BOTH, uses_kl=True, sequence_parallel=True),
    Case("exaone4", "adapt", {**BOTH, **ONE_KV_HEAD}, sequence_parallel=True, documents=True),
    Case("gemma3", "route", BOTH, "all", sequence_parallel=True, kept_results="products"),
    Case("mixtral", "route", BOTH, documents=True),
    Case("qwen3_moe dense layer", "adapt", BOTH, "all", uses_kl=True, sequence_parallel=True),
]
EXTENDED = [
    Case("llama", method, {"rank": 2} if method == "lora" else {}, uses_kl=True, new_tokens=True)
    for method in ("preserve", "route", "fft", "lora")
]
OWN = {"open_rows": {"min_count": 1}, "open_gains": True, "low_rank": 2}
OWN_OF_LORA = {"rank": 4, "alpha": 6, "open_rows": {"min_count": 1}, "open_gains": True}
OWN_WEIGHTS = [
    Case("llama", "preserve", {"open_first_layer": 1, **OWN}),
    Case("llama tied", "adapt", {**BOTH, **OWN}, uses_kl=True, documents=True),
    Case("qwen3", "preserve", {"open_first_layer": 1, **OWN}, uses_kl=True, sequence_parallel=True),
    Case("neox", "adapt", {**BOTH, **OWN}, "all", uses_kl=True, sequence_parallel=True),
    Case("llama tied", "lora", OWN_OF_LORA, uses_kl=True, sequence_parallel=True),
]
SEQUENCE_PARALLEL = [replace(case, sequence_parallel=True, documents=True) for case in EVERY_METHOD]
# Llama and GPT-NeoX change places: one is split by positions over two ranks, the other over four.
CASES = {
    2: [
        *EVERY_METHOD[:4],
        *SEQUENCE_PARALLEL[4:],
        *WITH_KL,
        *FEATURED,
        *EXTENDED,
        *OWN_WEIGHTS,
        Case("gemma2", "adapt", {**BOTH, **OWN}, sequence_parallel=True, documents=True),
        Case("llama biases", "adapt", {**BOTH, **OWN, **ONE_KV_HEAD}, precision="fp8"),
        Case("llama biases", "adapt", {**BOTH, **ONE_KV_HEAD}),
        Case("qwen2", "adapt", {"norm": "base"}),
        Case("neox sequential", "adapt", {"collaborative_modules": "ffn"}),
        Case("neox tied", "fft"),
        Case("llama one kv head", "lora", {"rank": 4, "alpha": 6}),
        Case("neox", "lora", {"rank": 4, "target_modules": ["value", "output", "down"]}),
        Case("neox sequential", "route", {"norm": "base"}, "collaborative", sequence_parallel=True),
        Case("llama biases", "adapt", {**BOTH, **ONE_KV_HEAD}, "all", sequence_parallel=True),
        Case("neox", "llama_pro", {"added_layers": 1}, sequence_parallel=True),
        Case("llama", "freeze", {"frozen_layers": 1}, sequence_parallel=True),
        Case(
            "llama biases",
            "adapt",
            BOTH,
            "all",
            uses_kl=True,
            precision="fp8",
            kept_results="attention",
        ),
        Case("llama eight heads, wide", "route", BOTH, sequence_parallel=True, precision="nf4"),
        Case("llama eight heads, wide", "lora", {"rank": 4}, precision="nf4"),
        Case("glm4_moe normed heads", "adapt", BOTH, sequence_parallel=True),
        Case("qwen2_moe", "route", BOTH, "all", kept_results="products"),
        Case("exaone_moe", "lora", {"rank": 4}),
        Case("qwen3_moe", "lora", {"rank": 4}),
        Case("qwen2_moe", "fft", sequence_parallel=True, uses_kl=True),
        Case("qwen3_moe", "adapt", BOTH, "all", precision="fp8"),
    ],
    4: [
        *EVERY_METHOD[4:],
        *SEQUENCE_PARALLEL[:4],
        *WITH_KL[2:4],
        *FEATURED[-2:],
        *(replace(case, base="llama eight heads") for case in EXTENDED),
        *OWN_WEIGHTS,
        Case(
            "llama", "route", {**BOTH, **ONE_KV_HEAD}, "all", sequence_parallel=True, documents=True
        ),
        Case("neox tied", "adapt", {**BOTH, "norm": "base"}, sequence_parallel=True),
        Case("llama biases", "adapt", {**BOTH, **ONE_KV_HEAD}),
        Case("llama", "adapt", BOTH, precision="fp8"),
    ],
    # One new key/value head among four new query heads, as Llama-3.2-1B's.
    8: [
        Case("llama eight heads", "adapt", {**BOTH, "l_fp": 0, **ONE_KV_HEAD_IN_FOUR}),
        Case("neox eight heads", "route", {**BOTH, "l_fp": 0}),
    ],
}


@pytest.fixture(scope="module")
def outcomes(base):
    """The ranks' outcomes of every case at a tensor-parallel size, computed by one start of the
    ranks."""
    known: dict[int, list[dict[str, Outcome]]] = {}

    def of(tp_size: int, case: Case) -> list[Outcome]:
        if tp_size not in known:
            cases = [(each, base(each.base).path) for each in CASES[tp_size]]
            known[tp_size] = run_ranks(outcomes_of_rank, tp_size, cases)
        return [rank[str(case)] for rank in known[tp_size]]

    return of


@pytest.mark.parametrize(
    ("tp_size", "case"), [(size, case) for size, cases in CASES.items() for case in cases], ids=str
)
def test_ranks_compute_what_one_process_computes(base, outcomes, tp_size, case):
    ranks = outcomes(tp_size, case)
    whole = outcome(case.build(base(case.base).path, SINGLE), case)
    bound, bound_of_gradients = (
        rounding_of(base(case.base).spec, backward=backward) for backward in (False, True)
    )
    for path, expected in whole.logits.items():
        columns = torch.cat([rank.logits[path] for rank in ranks], dim=-1)[..., ranks[0].places]
        assert_near(columns, expected, bound, f"logits of path {path}")
    for rank in ranks:
        assert torch.equal(rank.greedy, rank.places[whole.greedy])
        assert_near(rank.loss, whole.loss, bound, "loss")
        assert_near(rank.nll, whole.nll, bound, "nll")
        if case.uses_kl:
            # A difference of log probabilities, which are rounded however small it is.
            assert whole.kl.any()
            assert_near(rank.kl, whole.kl, bound, "kl", scale=whole.nll)
        assert torch.equal(rank.preserved, whole.preserved)
    if case.method == "route":
        assert whole.preserved.any()
        assert not whole.preserved.all()

    for name, expected in whole.gradients.items():
        partition = ranks[0].partitions[name]
        shards = [rank.gradients[name] for rank in ranks]
        replicas = partition.replicas(tp_size)
        for first in range(0, tp_size, replicas):
            for shard in shards[first : first + replicas]:
                assert torch.equal(shard, shards[first]), (
                    f"{name}: holders of the same shard would drift apart"
                )
        size = 0 if partition.dim is None else expected.shape[partition.dim]
        assert expected.any(), f"{name} is not reached"
        assert_near(merge(shards, partition, size), expected, bound_of_gradients, name)
    norm, expected_norm = sum(rank.squared_norm for rank in ranks) ** 0.5, whole.squared_norm**0.5
    assert norm == pytest.approx(expected_norm, rel=bound_of_gradients)


def base_streams_of_rank(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    tp = all_ranks()
    base = open_base(path)
    tokens = some_tokens(base.spec, 2, 24)
    model = widened(base, scale_settings("preserve"), tp=tp, noise=0.1)
    with torch.no_grad():
        paths = [model.hidden_states(tokens, path=path).x for path in ("model", "base")]
        return (*paths, unwidened(base, tp).hidden_states(tokens).x)


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_preserve_keeps_the_base_stream_to_the_bit_over_two_ranks(base, name):
    """Two ranks' sums have one order only; over more, the order may depend on the length of the
    message."""
    for found, masked, expected in run_ranks(base_streams_of_rank, 2, base(name).path):
        assert torch.equal(found, expected)
        assert torch.equal(masked, expected)
