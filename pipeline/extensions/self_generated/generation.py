"""A base model writes documents: batches of samples from its own distribution."""

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
from pipeline.hf.load import load_hf_model, pop_eos_token_ids

_Ids = npt.NDArray[Any]
_FIRST_TOKENS = 32
"""After so many tokens, and after each doubling, finished documents leave the batch."""


class BaseWriter:
    """The base model in `base` on `device`, in the type of its files.

    It samples from the ids of `tokenizer` alone.

    Of the base's own generation_config.json every `eos_token_id` is an end; nothing else is used.

    Raises:
        BaseModelError: the folder cannot be loaded; no code in it is run.
    """

    def __init__(self, base: Path, tokenizer: Tokenizer, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._tokenizer = tokenizer
        self._model: Any = load_hf_model(base, device=device)
        # A document is over where the base writes the token that ends one, or that starts the next.
        start = tokenizer.document_start[:1]
        self._ends = [tokenizer.document_end[-1], *start, *pop_eos_token_ids(self._model)]

    def write(
        self,
        prompts: Sequence[_Ids],
        *,
        temperature: float,
        max_tokens: int,
        batch_size: int,
        seed: int,
    ) -> list[_Ids]:
        """Continues each prompt, of at least one id, to a document of at most `max_tokens` tokens.

        A document is over where the base writes the token that ends one, or that starts the next,
        as bases do that were trained on text packed with only a BOS in between. It always gets the
        tokenizer's own end, as in every corpus, even where it is cut: the KL loss compares
        distributions, and never teaches that the end follows.

        Those that are not over after a few tokens go on together, for twice as many: no batch waits
        for its longest document. A batch holds `batch_size` documents of about the same length.
        """
        max_length = max_tokens - len(self._tokenizer.document_end)
        texts = [prompt.astype(np.int64) for prompt in prompts]
        unfinished = list(range(len(texts)))
        new_tokens = _FIRST_TOKENS
        with _reproducible(self.device, seed):
            while unfinished:
                # Documents of about the same length are a batch: less padding.
                unfinished.sort(key=lambda number: len(texts[number]))
                for first in range(0, len(unfinished), batch_size):
                    batch = unfinished[first : first + batch_size]
                    continued = self._continued(
                        [texts[number] for number in batch], temperature, max_length, new_tokens
                    )
                    for number, ids in zip(batch, continued, strict=True):
                        texts[number] = ids
                still_unfinished: list[int] = []
                for number in unfinished:
                    has_room = len(texts[number]) < max_length
                    # An end within the prompt, as chats have, ends nothing.
                    written = texts[number][len(prompts[number]) :]
                    if has_room and not np.isin(written, self._ends).any():
                        still_unfinished.append(number)
                unfinished = still_unfinished
                new_tokens *= 2
        documents: list[_Ids] = []
        for ids, prompt in zip(texts, prompts, strict=True):
            documents.append(_document(ids, len(prompt), self._ends, self._tokenizer.document_end))
        return documents

    @torch.inference_mode()
    def _continued(
        self, texts: Sequence[_Ids], temperature: float, max_length: int, new_tokens: int
    ) -> list[_Ids]:
        """Each text with `new_tokens` more, at most `max_length` in all.

        What follows an end is to be cut off.
        """
        longest = max(map(len, texts))
        shortest = min(map(len, texts))
        padding = self._ends[0]
        # Texts end at the same column, where `generate` goes on: shorter ones are padded on the
        # left.
        tokens = torch.full((len(texts), longest), padding, device=self.device)
        attention_mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            tokens[row, longest - len(text) :] = torch.from_numpy(text)
            attention_mask[row, longest - len(text) :] = 1
        # Some bases have more rows in their embedding than the tokenizer has ids.
        rows = int(self._model.get_output_embeddings().weight.shape[0])
        beyond_tokenizer = list(range(self._tokenizer.vocab_size, rows))
        config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            # The whole distribution: KL(base || model) is to be small on its tail, too.
            top_k=0,
            top_p=1.0,
            max_new_tokens=min(new_tokens, max_length - shortest),
            eos_token_id=self._ends,
            pad_token_id=padding,
            suppress_tokens=beyond_tokenizer or None,
        )
        generated = self._model.generate(
            tokens, attention_mask=attention_mask, generation_config=config
        )
        continued: list[_Ids] = []
        for row, text in zip(generated.cpu().numpy(), texts, strict=True):
            without_padding = row[longest - len(text) :]
            continued.append(without_padding[:max_length])
        return continued


def _document(ids: _Ids, prompt: int, ends: Sequence[int], end: tuple[int, ...]) -> _Ids:
    """The document in `ids`: a prompt of `prompt` ids, text up to one of `ends`, then `end`."""
    is_end = np.isin(ids[prompt:], ends)
    if is_end.any():
        first_end = prompt + int(is_end.argmax())
        # An end of several tokens may stand there as a whole, with `first_end` as its last one.
        whole_end = first_end + 1 - len(end)
        is_whole = whole_end >= prompt and tuple(ids[whole_end : first_end + 1]) == end
        ids = ids[:whole_end] if is_whole else ids[:first_end]
    return np.concatenate([ids, np.array(end, dtype=np.int64)])


@contextlib.contextmanager
def _reproducible(device: torch.device, seed: int) -> Iterator[None]:
    """Draws from `seed` within the block.

    On the CPU by a single thread, so that sums are rounded alike everywhere.
    """
    # The order of a sum over threads depends on their number.
    threads = torch.get_num_threads()
    on_gpu = device.type == "cuda"
    # Draws of this process outside of the block go on as if there were none within it.
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.manual_seed(seed)
        try:
            if not on_gpu:
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)
