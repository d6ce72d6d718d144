"""Which own row each token has, as exports hold it beside the rows."""

from __future__ import annotations

from functools import partial

import torch

from pipeline.hf.write import PlannedTensor
from pipeline.model.open_weights import OwnRowOfToken


def own_row_tables(row_of: OwnRowOfToken | None) -> list[PlannedTensor]:
    """The tables of the input and of the output rows; none for a model without own rows."""
    if row_of is None:
        return []
    table = row_of.on(torch.device("cpu"))
    tensors: list[PlannedTensor] = []
    for module in ("own_input", "output"):
        name = f"{module}.row_of_token"
        make = partial(torch.clone, table)
        tensors.append(PlannedTensor(name, tuple(table.shape), make, torch.int32))
    return tensors
