"""A base model writes documents: batches of samples from its own distribution, with a cache of keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from pipeline.conversion.hf_folder import load_hf_model, taken_ends
from pipeline.data.tokenizer import Tokenizer


class BaseWriter:
    """The base model in `base` on `device`, in the type of its files; it samples from the ids of `tokenizer` alone.

    Of the base's own generation_config.json every `eos_token_id` is an end; nothing else is used.

    Raises:
        BaseModelError: the folder cannot be loaded; no code in it is run.
    """

    def __init__(self, base: Path, tokenizer: Tokenizer, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._tokenizer = tokenizer
        self._model: Any = load_hf_model(base, device=device)
        self._ends = taken_ends(self._model)

    @torch.inference_mode()
    def write(
        self, openings: Sequence[npt.NDArray[Any]], *, temperature: float, max_tokens: int, seed: int
    ) -> list[npt.NDArray[np.int64]]:
        """Continues each opening (ids, at least one) to a document of at most `max_tokens` tokens, its end included.

        A document is over where the base writes the token that ends one, or the token that starts the next: bases that
        were trained on packed text with only a BOS in between write that one. It gets the tokenizer's own end in either
        case, and also where it is cut at `max_tokens`. Packed without document masks, nothing else would keep two
        documents apart, and every corpus has this form. The cut claims nothing wrong: rehearsal compares the model with
        the base's distribution at each position, and never learns that the end follows.
        """
        end = self._tokenizer.document_end
        ends = [end[-1], *self._tokenizer.document_start[:1], *self._ends]
        room = max_tokens - len(end)
        longest = max(map(len, openings))
        tokens = torch.full((len(openings), longest), end[-1], device=self.device)
        is_given = torch.zeros_like(tokens)
        for row, opening in enumerate(openings):
            tokens[row, longest - len(opening) :] = torch.from_numpy(opening.astype(np.int64))
            is_given[row, longest - len(opening) :] = 1
        padding = longest - is_given.sum(dim=1)
        rows = int(self._model.get_output_embeddings().weight.shape[0])
        config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_length=room + int(padding.max()),
            eos_token_id=ends,
            pad_token_id=end[-1],
            # Some bases have more rows in their embedding than the tokenizer has ids.
            suppress_tokens=list(range(self._tokenizer.vocab_size, rows)) or None,
        )
        with _reproducible(self.device, seed):
            written = self._model.generate(tokens, attention_mask=is_given, generation_config=config)
        found = zip(written.cpu().numpy(), padding.tolist(), map(len, openings), strict=True)
        return [_document(row[start : start + room], length, ends, end) for row, start, length in found]


def _document(
    ids: npt.NDArray[np.int64], opening: int, ends: Sequence[int], end: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """The document in `ids`, of which the first `opening` were given: up to the first of `ends`, then `end`."""
    is_end = np.isin(ids[opening:], ends)
    if is_end.any():
        last = opening + int(is_end.argmax())
        ids = ids[: last + 1]
        # An end of several tokens may stand there as a whole.
        ids = ids[: -len(end)] if last + 1 >= opening + len(end) and tuple(ids[-len(end) :]) == end else ids[:last]
    return np.concatenate([ids, np.array(end, dtype=np.int64)])


@contextlib.contextmanager
def _reproducible(device: torch.device, seed: int) -> Iterator[None]:
    """Draws from `seed` within the block, on the CPU by a single thread, so that sums are rounded alike everywhere."""
    threads = torch.get_num_threads()
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.manual_seed(seed)
        try:
            if not on_gpu:
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)
