"""Prompts that the model in training continues at each validation, for a reader."""

from __future__ import annotations

from pipeline.data.tokenizer.spelling import ids_of
from pipeline.observers.generation import likeliest_continuations, until_the_end
from pipeline.parallel.ranks import broadcast_from_rank0
from pipeline.training.observer import Observer, StepEvent, ValidationEvent
from pipeline.training.trainer import Trainer


class PromptTexts(Observer):
    """Adds the continuation of each prompt to the texts of a validation, and of step 0.

    The likeliest token follows each time, so that the texts of two steps differ by what was learned
    alone. Every rank continues every prompt.
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
        """The ids that follow each prompt; every rank must call it."""
        return likeliest_continuations(
            self.trainer.engine,
            prompts,
            new_tokens=self.settings.prompt_tokens,
            longest=self._longest(),
            device=self.trainer.device,
        )

    def _shown(self, number: int, ids: list[int]) -> str:
        """A prompt and the text up to the end of the document, in Markdown. On rank 0 alone."""
        tokenizer = self.trainer.inputs.tokenizer
        text = tokenizer.decode(until_the_end(ids, tokenizer))
        return f"**{self.settings.prompts[number]}** {text}"
