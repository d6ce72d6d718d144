"""What the model writes after fixed prompts (`validation.prompts`): greedy, so that nothing is drawn at random."""

from __future__ import annotations

import torch

from pipeline.checks.inputs import encoded_prompts
from pipeline.config.run import RunConfig
from pipeline.data.tokenizer import load_tokenizer
from pipeline.model.spec import DecoderSpec
from pipeline.training.batches import MicroBatch
from pipeline.training.engine import Engine


class Prompts:
    """The prompts of a run as ids; raises as `encoded_prompts`."""

    def __init__(self, config: RunConfig, spec: DecoderSpec) -> None:
        self.texts, self._new = config.validation.prompts, config.validation.prompt_tokens
        if not self.texts:
            return
        self._tokenizer = load_tokenizer(config.tokenizer)
        self._ids = encoded_prompts(config, self._tokenizer, spec)
        # Sequence parallelism shares positions out among the ranks evenly.
        tp_size = config.parallel.tp_size
        self._length = -(-(max(map(len, self._ids)) + self._new) // tp_size) * tp_size

    def continued(self, engine: Engine, device: torch.device) -> dict[str, str]:
        """The text after each prompt; every rank must call it, as often as the others.

        Each token is a forward pass over all prompts, without a cache: the same on every rank, however the model is
        split.
        """
        if not self.texts:
            return {}
        tokens = torch.zeros(len(self._ids), self._length, dtype=torch.long, device=device)
        ends = torch.tensor([len(ids) for ids in self._ids], device=device)
        for row, ids in enumerate(self._ids):
            tokens[row, : len(ids)] = torch.tensor(ids, device=device)
        rows = torch.arange(len(self._ids), device=device)
        positions = torch.arange(self._length, device=device).expand_as(tokens).contiguous()
        with engine.evaluating():
            for _ in range(self._new):
                batch = MicroBatch(tokens, tokens, positions, None)
                tokens[rows, ends] = engine.greedy_tokens(batch, rows * self._length + ends - 1)
                ends = ends + 1
        written = [ids[len(own) : len(own) + self._new] for ids, own in zip(tokens.tolist(), self._ids, strict=True)]
        return dict(zip(self.texts, map(self._text, written), strict=True))

    def _text(self, ids: list[int]) -> str:
        """The text of `ids` before the token that ends a document, or that starts the next."""
        stops = {self._tokenizer.document_end[-1], *self._tokenizer.document_start[:1]}
        end = next((at for at, token in enumerate(ids) if token in stops), len(ids))
        known = [token for token in ids[:end] if token < self._tokenizer.vocab_size]  # a base may have more rows
        return self._tokenizer.decode(known)
