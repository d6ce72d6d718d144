"""Tokens a second that a base writes for rehearsal, by batch size, beside `generate` of transformers for one at a time.

    make bench-sampling
    python -m benchmarks.sampling_throughput --base path/to/model --batch-sizes 8 32 --json benchmarks/out/sampling.json

`scale-cpt sample` calls the same `generate` with a batch of documents, and more processes do so at once; this measures
one process with one thread. All draw from the base's own distribution. They take turns, and the least processor time of
each counts, so that load on the machine changes little. Tokens are those up to a document's end, without its opening.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.data.tokenizer import Tokenizer, load_tokenizer
from pipeline.rehearsal.generation import BaseWriter

ALONE = "generate, one at a time"


@torch.inference_mode()
def alone(model: Any, tokenizer: Tokenizer, documents: int, max_tokens: int, seed: int) -> int:  # noqa: ANN401
    """The tokens of so many documents, one after the other."""
    torch.manual_seed(seed)
    first = torch.tensor([[(tokenizer.document_start or tokenizer.document_end)[-1]]])
    ends = [tokenizer.document_end[-1], int(first)]
    settings = GenerationConfig(do_sample=True, top_k=0, max_length=max_tokens, eos_token_id=ends, pad_token_id=ends[0])
    return sum(int(model.generate(first, generation_config=settings).shape[1]) - 1 for _ in range(documents))


def in_batches(
    writer: BaseWriter, tokenizer: Tokenizer, batch_size: int, documents: int, max_tokens: int, seed: int
) -> int:
    """The tokens of at least so many documents, in whole batches."""
    opening = np.array((tokenizer.document_start or tokenizer.document_end)[-1:])
    tokens = 0
    for number in range(-(-documents // batch_size)):
        written = writer.write([opening] * batch_size, temperature=1.0, max_tokens=max_tokens, seed=seed + number)
        tokens += sum(len(document) - len(opening) for document in written)
    return tokens


def measure(base: Path, batch_sizes: list[int], documents: int, max_tokens: int, turns: int) -> list[Row]:
    """A row for each way: tokens a second in its fastest turn, and how many times those of one at a time."""
    tokenizer, model = load_tokenizer(base), load_hf_model(base)
    model.generation_config = GenerationConfig()
    ways = {ALONE: partial(alone, model, tokenizer)}
    writer = BaseWriter(base, tokenizer)
    ways |= {f"sample, {size} at a time": partial(in_batches, writer, tokenizer, size) for size in batch_sizes}
    best = dict.fromkeys(ways, 0.0)
    for turn in range(turns):
        for name, way in ways.items():
            start = time.process_time()
            tokens = way(documents, max_tokens, seed=turn)
            best[name] = max(best[name], tokens / (time.process_time() - start))
    return [
        {"way": name, "tokens_per_second": rate, "times_one_at_a_time": rate / best[ALONE]}
        for name, rate in best.items()
    ]


def main() -> None:
    parser = make_parser(__doc__)
    add, positive = parser.add_argument, command_line.positive
    add("--base", type=Path, default=Path("data/models/stories260K"), help="default: data/models/stories260K")
    add("--batch-sizes", type=positive, nargs="+", default=[8, 32, 128], help="documents at a time (default: 8 32 128)")
    add("--documents", type=positive, default=8, help="of a turn, at least (default: 8)")
    add("--max-tokens", type=positive, default=128, help="of a document (default: 128)")
    add("--turns", type=positive, default=3, help="of each way (default: 3)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.base, options.batch_sizes, options.documents, options.max_tokens, options.turns)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
