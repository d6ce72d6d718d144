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

from pipeline.data.tokenizer.load import Tokenizer
from pipeline.hf.load import load_hf_model, taken_ends

_Ids = npt.NDArray[Any]
_FIRST_TOKENS = 32
"""After so many, and again whenever a document has about twice as many, those that are over leave."""


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

    def write(
        self,
        prompts: Sequence[_Ids],
        *,
        temperature: float,
        max_tokens: int,
        batch_size: int,
        seed: int,
    ) -> list[_Ids]:
        """Continues each opening (ids, at least one) to a document of at most `max_tokens` tokens, its end included.

        A document is over where the base writes the token that ends one, or that starts the next, as bases do that were
        trained on text packed with only a BOS in between. It always gets the tokenizer's own end, as in every corpus,
        even where it is cut: rehearsal compares distributions, and never learns that the end follows.

        Those that are not over after a few tokens go on together, for twice as many: no batch waits for its longest
        document. A batch holds `batch_size` documents of about the same length.
        """
        end = self._tokenizer.document_end
        ends = [end[-1], *self._tokenizer.document_start[:1], *self._ends]
        room, new = max_tokens - len(end), _FIRST_TOKENS
        found = [opening.astype(np.int64) for opening in prompts]
        left = list(range(len(found)))
        with _reproducible(self.device, seed):
            while left:
                left.sort(key=lambda number: len(found[number]))
                for first in range(0, len(left), batch_size):
                    batch = left[first : first + batch_size]
                    written = self._continued(
                        [found[number] for number in batch], temperature, room, new, ends
                    )
                    for number, ids in zip(batch, written, strict=True):
                        found[number] = ids
                left = [
                    number
                    for number in left
                    if len(found[number]) < room
                    and not np.isin(found[number][len(prompts[number]) :], ends).any()
                ]
                new *= 2
        return [
            _document(ids, len(opening), ends, end)
            for ids, opening in zip(found, prompts, strict=True)
        ]

    @torch.inference_mode()
    def _continued(
        self, texts: Sequence[_Ids], temperature: float, room: int, new: int, ends: list[int]
    ) -> Iterator[_Ids]:
        """Each text with `new` more tokens, at most `room` in all; what follows an end is of no consequence."""
        longest = max(map(len, texts))
        tokens = torch.full((len(texts), longest), ends[0], device=self.device)
        is_given = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, longest - len(text) :] = torch.from_numpy(text)
            is_given[row, longest - len(text) :] = 1
        rows = int(self._model.get_output_embeddings().weight.shape[0])
        config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=min(new, room - min(map(len, texts))),
            eos_token_id=ends,
            pad_token_id=ends[0],
            # Some bases have more rows in their embedding than the tokenizer has ids.
            suppress_tokens=list(range(self._tokenizer.vocab_size, rows)) or None,
        )
        written = (
            self._model.generate(tokens, attention_mask=is_given, generation_config=config)
            .cpu()
            .numpy()
        )
        return (row[longest - len(text) :][:room] for row, text in zip(written, texts, strict=True))


def _document(ids: _Ids, opening: int, ends: Sequence[int], end: tuple[int, ...]) -> _Ids:
    """The document in `ids`, of which the first `opening` were given: up to the first of `ends`, then `end`."""
    is_end = np.isin(ids[opening:], ends)
    if is_end.any():
        last = opening + int(is_end.argmax())
        ids = ids[: last + 1]
        # An end of several tokens may stand there as a whole.
        ids = (
            ids[: -len(end)]
            if last + 1 >= opening + len(end) and tuple(ids[-len(end) :]) == end
            else ids[:last]
        )
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
