"""A CPU's attention in packed documents: document by document, and with a mask of all pairs.

    python -m benchmarks.cpu_attention --json benchmarks/out/cpu_attention.json

A row is a length of documents in sequences of one length: forward and backward pass of one layer.
Both ways take turns, and the fastest turn of each counts, in processor time. `ratio` is the time
document by document over that with a mask. `difference` is the largest one of the results.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.results import Row, Stopwatch, in_turns, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.model.attention import (
    Attend,
    DocumentAttention,
    Documents,
    MaskedAttention,
    document_mask,
)
from pipeline.parallel.parameters import default_dtype

ROWS = 2
QUERY_HEADS, KEY_HEADS, HEAD_DIM = 9, 3, 64
"""Of SmolLM2-135M."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _cpu_seconds(attend: Attend, heads: list[torch.Tensor]) -> float:
    watch = Stopwatch()
    attend(*heads).sum().backward()
    return watch.elapsed().cpu_seconds


def rows_of(sequence_length: int, dtype: torch.dtype, turns: int) -> Iterator[Row]:
    """A row for each length of documents: the whole sequence, and down to a sixteenth of it."""
    with default_dtype(dtype):
        query = torch.randn(ROWS, sequence_length, QUERY_HEADS, HEAD_DIM, requires_grad=True)
        key, value = torch.randn(2, ROWS, sequence_length, KEY_HEADS, HEAD_DIM).unbind()
    heads = [query, key.requires_grad_(), value.requires_grad_()]
    for parts in (1, 2, 4, 16):
        length = max(1, sequence_length // parts)
        ids = torch.arange(sequence_length).div(length, rounding_mode="floor")
        documents = Documents.of(ids.expand(ROWS, -1))
        masked = MaskedAttention(document_mask(documents.ids, dtype))
        by_document = DocumentAttention(documents.lengths)
        ways = {
            "masked": partial(_cpu_seconds, masked, heads),
            "documents": partial(_cpu_seconds, by_document, heads),
        }
        taken = in_turns(ways, turns)
        masked_ms, documents_ms = (1e3 * min(taken[way]) for way in ways)
        with torch.no_grad():
            difference = (masked(*heads).float() - by_document(*heads).float()).abs().max()
        yield {
            "sequence": sequence_length,
            "document": length,
            "masked_ms": masked_ms,
            "documents_ms": documents_ms,
            "ratio": documents_ms / masked_ms,
            "difference": difference.item(),
        }


def main() -> None:
    parser = make_parser(__doc__)
    add, positive = parser.add_argument, command_line.positive
    add(
        "--sequence-lengths",
        type=positive,
        nargs="+",
        default=[512, 2048],
        help="tokens of a sequence (default: 512 2048)",
    )
    add("--dtype", choices=TYPES, default="fp32", help="(default: fp32)")
    add("--turns", type=positive, default=5, help="of each way (default: 5)")
    add("--threads", type=positive, default=1, help="of torch (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for length in options.sequence_lengths:
        rows += rows_of(length, TYPES[options.dtype], options.turns)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
