"""Which own row each token has, as exports hold it beside the rows."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.hf.write import PlannedTensor
from pipeline.model.own_weights import OwnRowOfToken
from pipeline.scale.plan import ExpansionPlan


def own_row_tables(plan: ExpansionPlan, vocab_size: int) -> list[PlannedTensor]:
    """The tables of the input and of the output rows; none for a plan without own rows."""
    if plan.own is None or plan.own.tokens is None:
        return []
    table = OwnRowOfToken(plan.own.tokens, vocab_size).on(torch.device("cpu"))
    tensors: list[PlannedTensor] = []
    for module in ("own_input", "output"):
        name = f"{module}.row_of_token"
        make = partial(torch.clone, table)
        tensors.append(PlannedTensor(name, tuple(table.shape), make, torch.int32))
    return tensors
