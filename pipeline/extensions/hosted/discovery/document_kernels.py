"""Whether a base attends rightly by the kernels of native bases, found by trying it.

Its attention must call the function that its configuration names, give it the arguments of the
forward pass, and ask for nothing but causal attention, perhaps with a window or capped scores. No
attribute of a class says so; logits do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.errors import in_one_line
from pipeline.extensions.hosted.base_attention import (
    ROWS,
    BaseAttention,
    UnsupportedAttentionError,
)
from pipeline.extensions.hosted.discovery.document_separation import row_of_documents
from pipeline.extensions.hosted.discovery.recorded_calls import differs
from pipeline.extensions.hosted.documents import kernel_inputs
from pipeline.extensions.hosted.structure import DocumentSeparation
from pipeline.model.attention import Documents
from pipeline.model.paths import TokenBatch

_TOLERANCE = 1e-4


@torch.no_grad()
def kernels_unsupported_reason(tiny: PreTrainedModel, separation: DocumentSeparation) -> str | None:
    """Why the base cannot attend by these kernels, as a clause; None: it can.

    Tried are a row of documents, and each document in a row of its own: both must give the logits
    that transformers' own attention gives each alone.

    Args:
        tiny: a tiny copy of the base, whose windows are shorter than a document.
        separation: how the base keeps documents of a row apart, otherwise.
    """
    if separation == "one_document":
        return "each document has a row of its own"
    row = row_of_documents()
    alone = row.alone(tiny)
    documents = Documents.of((row.positions == 0).cumsum(-1))
    batches = [TokenBatch(row.ids, row.positions, documents)]
    batches += [TokenBatch(part, None, None) for part in row.parts]
    logits: list[Tensor] = []
    attention = BaseAttention(tiny)
    all_inputs = [kernel_inputs(batch, separation) for batch in batches]
    try:
        for batch, inputs in zip(batches, all_inputs, strict=True):
            with attention.by_kernels():
                logits.append(tiny(input_ids=batch.tokens, **inputs).logits)
            if not inputs[ROWS].was_used:
                return "its attention is code of its own"
    except UnsupportedAttentionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - code that reads a mask raises anything without one
        return f"its code does not run without them ({type(error).__name__}: {in_one_line(error)})"
    for found in (logits[0], torch.cat(logits[1:], dim=1)):
        if found.shape != alone.shape or differs(found, alone, _TOLERANCE).any():
            return "its attention does more than the kernels compute"
    return None
