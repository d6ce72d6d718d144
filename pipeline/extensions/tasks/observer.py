"""lm-eval's tasks, answered by the model in training at some of its validations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.data.dataset.packing import IGNORED
from pipeline.data.tokenizer.load import Tokenizer
from pipeline.extensions.tasks.benchmarks import Result, task_results
from pipeline.extensions.tasks.checks import tasks_of
from pipeline.extensions.tasks.training_tasks import Answer, Question, WrittenQuestion, task_model
from pipeline.observers.generation import likeliest_continuations, until_the_end
from pipeline.parallel.ranks import broadcast_from_rank0, summed
from pipeline.training.batches import MicroBatch
from pipeline.training.observer import Observer, StepEvent, ValidationEvent
from pipeline.training.trainer import Trainer


class TaskScores(Observer):
    """Adds the accuracy of each task to the figures, as `<metric>/<task>`.

    lm-eval runs on rank 0 alone. What it asks is broadcast, and all ranks share the questions: each
    data-parallel rank scores some of them, and every rank runs as many micro-batches. No random
    number is drawn.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        settings = trainer.config.validation
        self.every_steps = settings.every_steps * settings.tasks_every
        if trainer.rank == 0:
            # They were loaded by the check before training.
            self.tasks = tasks_of(trainer.inputs)
            length = trainer.config.data.sequence_length
            self.model = task_model(
                trainer.inputs.tokenizer, self._share, self._share_written, length
            )

    def on_step(self, event: StepEvent) -> None:
        if event.step == 0:
            event.figures.update(self._asked())

    def on_validation(self, event: ValidationEvent) -> None:
        step = event.position.step
        is_due = step % self.every_steps == 0 or step == event.position.last_step(
            self.trainer.config
        )
        if is_due:
            event.figures.update(self._asked())

    def _asked(self) -> dict[str, float]:
        """The results, on every rank; every rank must call it."""
        if self.trainer.rank == 0:
            return self._ask()
        while True:
            asked: _Asked | None = broadcast_from_rank0(_nothing)
            if asked is None:
                break
            self._score(asked.questions)
            self._write(asked.written)
        figures: dict[str, float] = broadcast_from_rank0(dict)
        return figures

    def _ask(self) -> dict[str, float]:
        """lm-eval asks on rank 0, while the other ranks wait for its questions."""
        fault: Exception | None = None
        results: list[Result] = []
        try:
            results = task_results(self.model, self.tasks)
        except Exception as error:  # noqa: BLE001  # the other ranks must hear of it first
            fault = error
        broadcast_from_rank0(_nothing)

        def outcome() -> dict[str, float]:
            if fault is not None:
                raise fault
            return {f"{result.metric}/{result.task}": result.value for result in results}

        return broadcast_from_rank0(outcome)

    def _share(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers to what lm-eval asks; called on rank 0."""
        asked = broadcast_from_rank0(partial(_Asked, list(questions), []))
        return self._score(asked.questions)

    def _share_written(self, questions: Sequence[WrittenQuestion]) -> list[str]:
        """The written answers to what lm-eval asks; called on rank 0."""
        asked = broadcast_from_rank0(partial(_Asked, [], list(questions)))
        return self._write(asked.written)

    def _score(self, questions: list[Question]) -> list[Answer]:
        """The answers, on every rank, which all must call it with the same questions."""
        if not questions:
            return []
        trainer = self.trainer
        engine = trainer.engine
        layout = trainer.inputs.layout
        size = trainer.config.schedule.micro_batch_size
        # Alike lengths together: less padding. Every rank has the same order.
        order = sorted(range(len(questions)), key=lambda place: _length(questions[place]))
        # A row a question, which one rank fills: the log likelihood, and the tokens that greedy
        # decoding would not choose.
        rows = torch.zeros(len(questions), 2, dtype=torch.float64, device=trainer.device)
        with engine.evaluating():
            for first in range(0, len(order), size * layout.dp_size):
                group = order[first : first + size * layout.dp_size]
                # As wide as the group's longest on all ranks, and a multiple that sequence
                # parallelism splits.
                longest = max(_length(questions[place]) for place in group)
                width = -(-longest // layout.tp_size) * layout.tp_size
                start = layout.dp_rank(trainer.rank) * size
                own = group[start : start + size]
                # All ranks must run the same forwards: the first question fills up a micro-batch.
                filled = [*own, *[group[0]] * (size - len(own))]
                batch = _batch([questions[place] for place in filled], width).on(trainer.device)
                losses = engine.loss(batch)
                assert losses.is_greedy_choice is not None
                if layout.tp_rank(trainer.rank) != 0:
                    continue  # tensor-parallel neighbours have the same losses
                likelihood = losses.nll.double().neg().sum(dim=1)
                missed = (batch.targets != IGNORED) & ~losses.is_greedy_choice
                for row, place in enumerate(own):
                    rows[place, 0] = likelihood[row]
                    rows[place, 1] = missed[row].sum()
        # Each row is one rank's and zeros of the others: exact in any order.
        answers: list[Answer] = []
        for likelihood_of, missed_of in summed(rows).tolist():
            answers.append((likelihood_of, missed_of == 0))
        return answers

    def _write(self, questions: list[WrittenQuestion]) -> list[str]:
        """The written answers, on every rank, which all must call it with the same questions."""
        if not questions:
            return []
        trainer = self.trainer
        layout = trainer.inputs.layout
        size = trainer.config.schedule.micro_batch_size
        tokenizer = trainer.inputs.tokenizer
        # Answers of equal length together: every rank then takes as many passes. Every rank has the
        # same order.
        by_length: dict[int, list[int]] = {}
        for place, question in enumerate(questions):
            by_length.setdefault(question.new_tokens, []).append(place)
        # A row an answer, which one rank fills: its number of tokens, and their ids.
        rows = torch.zeros(
            len(questions), 1 + max(by_length), dtype=torch.int64, device=trainer.device
        )
        for new_tokens, places in by_length.items():
            for first in range(0, len(places), size * layout.dp_size):
                group = places[first : first + size * layout.dp_size]
                start = layout.dp_rank(trainer.rank) * size
                own = group[start : start + size]
                # All ranks must run the same forwards, on as many tokens: the first question fills
                # up a micro-batch.
                filled = [*own, *[group[0]] * (size - len(own))]
                answered = [questions[place] for place in filled]
                continued = likeliest_continuations(
                    trainer.engine,
                    [question.prompt for question in answered],
                    new_tokens=new_tokens,
                    longest=trainer.config.data.sequence_length,
                    device=trainer.device,
                    longest_prompt=max(len(questions[place].prompt) for place in group),
                    have_ended=partial(_have_ended, answered, tokenizer),
                )
                if layout.tp_rank(trainer.rank) != 0 or not own:
                    continue  # tensor-parallel neighbours have the same answers
                for place, ids in zip(own, continued, strict=False):
                    kept = until_the_end(ids, tokenizer)
                    rows[place, 0] = len(kept)
                    rows[place, 1 : 1 + len(kept)] = torch.tensor(kept, device=trainer.device)
        texts: list[str] = []
        for count, *ids in summed(rows).tolist():
            texts.append(tokenizer.decode(ids[:count]))
        return texts


@dataclass(frozen=True)
class _Asked:
    """What rank 0 broadcasts: questions with choices, or those that take a text."""

    questions: list[Question]
    written: list[WrittenQuestion]


def _have_ended(
    questions: Sequence[WrittenQuestion], tokenizer: Tokenizer, continued: list[list[int]]
) -> bool:
    """Whether each answer holds what ends it, or the end of the document."""
    for question, ids in zip(questions, continued, strict=True):
        kept = until_the_end(ids, tokenizer)
        if len(kept) < len(ids):
            continue
        text = tokenizer.decode(kept)
        if not any(end in text for end in question.ends if end):
            return False
    return True


def _nothing() -> None:
    """What is broadcast where no more questions follow."""


def _length(question: Question) -> int:
    """The tokens that are read: all but the last one, which is only predicted."""
    context, continuation = question
    return len(context) + len(continuation) - 1


def _batch(questions: Sequence[Question], width: int) -> MicroBatch:
    """Questions as rows of [B, width]; only what may follow the context is predicted."""
    tokens = torch.zeros(len(questions), width, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row, (context, continuation) in enumerate(questions):
        ids = torch.tensor([*context, *continuation])
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, len(context) - 1 : len(ids) - 1] = ids[len(context) :]
    positions = torch.arange(width).expand_as(tokens)
    return MicroBatch(tokens, targets, positions, None)
