"""lm-eval's tasks on the model while it trains; each data-parallel rank scores a share of the questions."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.data.packing import IGNORED
from pipeline.data.tokenizer import load_tokenizer
from pipeline.evaluation.benchmarks import load_tasks, task_results
from pipeline.parallel.ranks import run_on_all_ranks, summed
from pipeline.training.batches import MicroBatch
from pipeline.training.observer import Observer, ValidationEvent
from pipeline.training.trainer import Trainer


class TaskScores(Observer):
    """Adds `<metric>/<task>` to the figures of every `validation.tasks_every`-th validation, and of the last."""

    def __init__(self, trainer: Trainer) -> None:
        """Every rank must call it, if there are tasks. Raises as `load_tasks`."""
        self.trainer, config, settings = trainer, trainer.config, trainer.config.validation
        self.tasks = run_on_all_ranks(
            lambda: load_tasks(settings.tasks, include=settings.tasks_include, limit=settings.tasks_limit)
        )
        from pipeline.evaluation.scoring_model import ScoringModel  # needs lm-eval, which `load_tasks` has found

        self.model = ScoringModel(
            self.scores,
            load_tokenizer(config.tokenizer),
            context=trainer.inputs.base.spec.max_position_embeddings,
            batch_size=config.schedule.micro_batch_size * trainer.inputs.layout.dp_size,
        )

    def on_validation(self, event: ValidationEvent) -> None:
        config, step = self.trainer.config, event.position.step
        settings, is_last = config.validation, event.stop is not None or event.position.is_end_of(config)
        if is_last or step // settings.every_steps % settings.tasks_every == 0:
            with self.trainer.engine.evaluating():
                found = task_results(self.model, self.tasks, bootstrap_iters=0)  # it would fork every rank
            event.figures.update({f"{result.metric}/{result.task}": result.value for result in found})

    def scores(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `evaluation.scoring_model.Scores`; every rank must call it."""
        trainer, layout, (count, width) = self.trainer, self.trainer.inputs.layout, tokens.shape
        rows, tp_size = trainer.config.schedule.micro_batch_size, layout.tp_size
        whole = -(-width // tp_size) * tp_size  # sequence parallelism divides it
        start = min(layout.dp_rank(trainer.rank) * rows, count)
        own = slice(start, min(start + rows, count))
        own_tokens = torch.zeros(rows, whole, dtype=torch.long)
        own_targets = torch.full((rows, whole), IGNORED)
        own_tokens[: own.stop - start, :width], own_targets[: own.stop - start, :width] = tokens[own], targets[own]
        positions = torch.arange(whole).expand_as(own_tokens).contiguous()
        with trainer.phases("validation"):  # each batch is progress for the watchdog
            losses = trainer.engine.loss(MicroBatch(own_tokens, own_targets, positions, None).on(trainer.device))
        assert losses.is_greedy_choice is not None
        found = torch.zeros(2, count, width, dtype=torch.float64, device=trainer.device)
        if layout.tp_rank(trainer.rank) == 0:
            both = torch.stack([losses.nll.double(), losses.is_greedy_choice.double()])
            found[:, own] = both[:, : own.stop - start, :width]
        nll, is_greedy = summed(found)
        return nll, is_greedy > 0
