"""Prompts that the model in training continues at each validation, for a reader."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.data.dataset.packing import IGNORED
from pipeline.data.tokenizer.spelling import ids_of
from pipeline.parallel.ranks import broadcast_from_rank0
from pipeline.training.batches import MicroBatch
from pipeline.training.observer import Observer, StepEvent, ValidationEvent
from pipeline.training.trainer import Trainer


class PromptTexts(Observer):
    """Adds the continuation of each prompt to the texts of a validation, and of step 0.

    The likeliest token follows each time: no random number is drawn, and the texts of two steps
    differ by what was learned alone. The model is that of training, without a gate. Every rank
    continues every prompt, because under ZeRO-3 and tensor parallelism all ranks run each layer
    together. Nothing is kept from one token to the next, so that a prompt takes as many passes as
    tokens follow it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.settings = trainer.config.validation
        self.prompts: list[list[int]] = broadcast_from_rank0(self._encoded)

    def on_step(self, event: StepEvent) -> None:
        if event.step == 0:
            event.texts.update(self._continued())

    def on_validation(self, event: ValidationEvent) -> None:
        event.texts.update(self._continued())

    def _encoded(self) -> list[list[int]]:
        """The ids of each prompt, after what a document follows in training. On rank 0 alone."""
        if not self.settings.prompts:
            return []
        tokenizer = self.trainer.inputs.tokenizer
        # A prompt keeps its end where both do not fit.
        room = max(1, self._longest() - self.settings.prompt_tokens)
        encoded: list[list[int]] = []
        for prompt in self.settings.prompts:
            ids = [*tokenizer.before_document, *ids_of(tokenizer, prompt, control=True)]
            encoded.append(ids[-room:])
        return encoded

    def _longest(self) -> int:
        """The most tokens that are read at once: those of a training sample."""
        return self.trainer.config.data.sequence_length

    def _continued(self) -> dict[str, str]:
        """The text of each prompt with its continuation, on rank 0; every rank must call it."""
        texts: dict[str, str] = {}
        size = self.trainer.config.schedule.micro_batch_size
        for first in range(0, len(self.prompts), size):
            batch = self.prompts[first : first + size]
            for place, ids in enumerate(self._continue(batch)):
                number = first + place
                if self.trainer.rank == 0:
                    texts[f"prompt/{number + 1}"] = self._shown(number, ids)
        return texts

    def _continue(self, prompts: list[list[int]]) -> list[list[int]]:
        """The ids that follow each prompt."""
        engine = self.trainer.engine
        device = self.trainer.device
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        needed = int(lengths.max()) + self.settings.prompt_tokens
        # Sequence parallelism splits a sequence over the tensor-parallel ranks.
        tp_size = engine.tensor_parallel.size
        width = min(-(-needed // tp_size) * tp_size, self._longest())
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64, device=device)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids, device=device)

        rows = torch.arange(len(prompts), device=device)
        steps = min(self.settings.prompt_tokens, width - int(lengths.max()))
        with engine.evaluating():
            for step in range(steps):
                # What follows the last token is not read: attention is causal.
                hidden = engine.hidden_states(_batch(tokens), "model")
                last = hidden.rows(rows * width + lengths + step - 1)
                tokens[rows, lengths + step] = engine.likeliest_tokens(last)
        continued: list[list[int]] = []
        for row, ids in zip(tokens.tolist(), prompts, strict=True):
            continued.append(row[len(ids) : len(ids) + steps])
        return continued

    def _shown(self, number: int, ids: list[int]) -> str:
        """A prompt and the text up to the end of the document, in Markdown. On rank 0 alone."""
        tokenizer = self.trainer.inputs.tokenizer
        ends = {tokenizer.document_end[-1], *tokenizer.document_start[:1]}
        written: list[int] = []
        for token in ids:
            if token in ends:
                break
            written.append(token)
        return f"**{self.settings.prompts[number]}** {tokenizer.decode(written)}"


def _batch(tokens: Tensor) -> MicroBatch:
    """Whole rows of one document each. tokens: [B, S]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return MicroBatch(tokens, torch.full_like(tokens, IGNORED), positions, None)
