"""Tokens a second of self-generated text, beside `generate` of transformers, by batch size.

    make bench-sampling
    python -m benchmarks.sampling_throughput --base path/to/chat/model --chats chats.jsonl

All draw from the base's own distribution. `generate` gets the same batches, and each waits for its
longest document; `sample` calls it in rounds, between which documents that are over leave
(pipeline/extensions/self_generated/generation.py).

A row has the tokens a second of one way, up to a document's end and without its prompt, and how
many times that is what `generate` writes one document at a time. Measured is one process with one
thread; `scale-cpt sample` has more. The ways take turns, and the turn with the most tokens for its
processor time counts, so that load on the machine changes little.
"""

from __future__ import annotations

import json
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.extensions.self_generated.generation import BaseWriter
from pipeline.hf.load import load_hf_model

ALONE = "generate, one at a time"
ALONE_FEWER = 32
"""So many times fewer documents than in batches are written one at a time."""
Ids = npt.NDArray[Any]


def opened(base: Path, tokenizer: Tokenizer, documents: int, chats: Path | None) -> list[Ids]:
    """The prompts of so many documents.

    They are the start token; or the chats of a file in turn, and every tenth time the start token.
    """
    # Of a tokenizer without a start token, documents begin after the end of another one.
    start = np.array((tokenizer.document_start or tokenizer.document_end)[-1:])
    if chats is None:
        return [start] * documents
    template = chat_template(base)
    found = []
    with chats.open(encoding="utf-8") as lines:
        for line in islice(lines, documents):
            # Without its last message, which the base is to write.
            text = template.opened(json.loads(line)["messages"][:-1])
            found.append(np.array(tokenizer.reference.encode([text]).ids.tolist()))
    prompts = []
    for number in range(documents):
        prompts.append(start if number % 10 == 0 else found[number % len(found)])
    return prompts


@torch.inference_mode()
def generated(
    model: Any, tokenizer: Tokenizer, size: int, prompts: list[Ids], max_tokens: int, seed: int
) -> int:
    """The tokens that `generate` writes after the prompts, `size` at a time."""
    torch.manual_seed(seed)
    ends = [tokenizer.document_end[-1], *tokenizer.document_start[:1]]
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_length=max_tokens, eos_token_id=ends, pad_token_id=ends[0]
    )
    tokens = 0
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        # Padded on the left, so that what is written follows the prompt directly.
        width = max(map(len, batch))
        rows = []
        masks = []
        for prompt in batch:
            padding = width - len(prompt)
            rows.append([ends[0]] * padding + prompt.tolist())
            masks.append([0] * padding + [1] * len(prompt))
        given = torch.tensor(rows)
        mask = torch.tensor(masks)
        written = model.generate(given, attention_mask=mask, generation_config=settings)[:, width:]
        # Up to the first end, which counts: 0 before it, 1 at it, more after it.
        ended = torch.isin(written, torch.tensor(ends)).cumsum(dim=1)
        tokens += int((ended.cumsum(dim=1) <= 1).sum())
    return tokens


def sampled(writer: BaseWriter, size: int, prompts: list[Ids], max_tokens: int, seed: int) -> int:
    """The tokens that `scale-cpt sample` writes after the prompts, `size` at a time."""
    written = writer.write(
        prompts, temperature=1.0, max_tokens=max_tokens, batch_size=size, seed=seed
    )
    # What is written begins with its prompt.
    return sum(len(ids) for ids in written) - sum(len(ids) for ids in prompts)


def measure(
    base: Path,
    batch_sizes: list[int],
    documents: int,
    max_tokens: int,
    turns: int,
    chats: Path | None,
) -> list[Row]:
    """A row for each way: tokens a second in its fastest turn, and over those of one at a time."""
    tokenizer = load_tokenizer(base)
    model = load_hf_model(base)
    # Without the base's own settings, such as a temperature: both ways draw from its distribution.
    model.generation_config = GenerationConfig()
    writer = BaseWriter(base, tokenizer)
    prompts = opened(base, tokenizer, documents, chats)
    ways = {ALONE: partial(generated, model, tokenizer, 1, prompts[::ALONE_FEWER])}
    for size in batch_sizes:
        ways[f"generate, {size} at a time"] = partial(generated, model, tokenizer, size, prompts)
        ways[f"sample, {size} at a time"] = partial(sampled, writer, size, prompts)
    best = dict.fromkeys(ways, 0.0)
    for turn in range(turns):
        for name, way in ways.items():
            start = time.process_time()
            # Another seed each turn: documents end elsewhere, and one turn may be lucky for a way.
            tokens = way(max_tokens, seed=turn)
            best[name] = max(best[name], tokens / (time.process_time() - start))
    rows: list[Row] = []
    for name, rate in best.items():
        ratio = rate / best[ALONE]
        rows.append({"way": name, "tokens_per_second": rate, "times_one_at_a_time": ratio})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    positive = command_line.positive
    add(
        "--base",
        type=Path,
        default=Path("examples/data/models/stories260K"),
        help="default: examples/data/models/stories260K",
    )
    add(
        "--chats",
        type=Path,
        help="JSONL of messages to answer; every tenth document is text (default: all are)",
    )
    add(
        "--batch-sizes",
        type=positive,
        nargs="+",
        default=[32, 128],
        help="documents at a time (default: 32 128)",
    )
    add("--documents", type=positive, default=256, help="of a turn (default: 256)")
    add("--max-tokens", type=positive, default=512, help="of a document (default: 512)")
    add("--turns", type=positive, default=3, help="of each way (default: 3)")
    options = parser.parse_args()
    # Threads that wait for each other would be in the processor time.
    torch.set_num_threads(1)
    rows = measure(
        options.base,
        options.batch_sizes,
        options.documents,
        options.max_tokens,
        options.turns,
        options.chats,
    )
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
