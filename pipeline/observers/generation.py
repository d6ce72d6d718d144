"""Text that the model in training writes: the likeliest token follows each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.data.dataset.packing import IGNORED
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.parallel.ranks import summed
from pipeline.training.batches import MicroBatch
from pipeline.training.engine import Engine


def likeliest_continuations(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    longest: int,
    device: torch.device,
    longest_prompt: int | None = None,
    have_ended: Callable[[list[list[int]]], bool] | None = None,
) -> list[list[int]]:
    """The ids that follow each prompt, at most `new_tokens` of each.

    No random number is drawn. The model is that of training, without a gate. Nothing is kept from
    one token to the next, so that every token takes a pass over the whole text.

    Under ZeRO-3, tensor parallelism and experts over ranks all ranks run each layer together: every
    rank must call this with equal `new_tokens` and a prompt that leaves room for them,
    tensor-parallel neighbours with equal prompts, and ranks that share experts with as many prompts
    and an equal `longest_prompt`.

    Args:
        engine: the engine that trains.
        prompts: ids, at least one each, as many prompts as a micro-batch has.
        new_tokens: how many tokens follow at most.
        longest: the most tokens that are read at once, prompt and continuation.
        device: of the engine.
        longest_prompt: the number of tokens of the longest prompt on any rank; None: every rank has
            the same prompts.
        have_ended: whether no more tokens of these continuations are of interest. A rank goes on
            until that holds on every rank. None: all tokens are.
    """
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    if longest_prompt is None:
        longest_prompt = int(lengths.max())
    needed = longest_prompt + new_tokens
    # Sequence parallelism splits a sequence over the tensor-parallel ranks.
    tp_size = engine.tensor_parallel.size
    width = min(-(-needed // tp_size) * tp_size, longest)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = torch.tensor(ids, device=device)

    rows = torch.arange(len(prompts), device=device)
    written = 0
    with engine.evaluating():
        while written < min(new_tokens, width - longest_prompt):
            # What follows the last token is not read: attention is causal.
            hidden = engine.hidden_states(_batch(tokens), "model")
            last = hidden.rows(rows * width + lengths + written - 1)
            tokens[rows, lengths + written] = engine.likeliest_tokens(last)
            written += 1
            if have_ended is not None:
                goes_on = not have_ended(_after(prompts, tokens, written))
                ranks_that_go_on = summed(torch.tensor(int(goes_on), device=device))
                if int(ranks_that_go_on) == 0:
                    break
    return _after(prompts, tokens, written)


def until_the_end(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """What stands before the end of the document, or the beginning of the next one."""
    ends = {tokenizer.document_end[-1], *tokenizer.document_start[:1]}
    kept: list[int] = []
    for token in ids:
        if token in ends:
            break
        kept.append(token)
    return kept


def _after(prompts: Sequence[Sequence[int]], tokens: Tensor, written: int) -> list[list[int]]:
    """The ids after each prompt. tokens: [B, S]."""
    continued: list[list[int]] = []
    for row, ids in zip(tokens.tolist(), prompts, strict=True):
        continued.append(row[len(ids) : len(ids) + written])
    return continued


def _batch(tokens: Tensor) -> MicroBatch:
    """Whole rows of one document each. tokens: [B, S]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return MicroBatch(tokens, torch.full_like(tokens, IGNORED), positions, None)
