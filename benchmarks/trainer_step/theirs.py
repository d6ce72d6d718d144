"""The other side: transformers' Trainer, with PEFT's adapters for LoRA."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.results import Elapsed, Stopwatch
from benchmarks.trainer_step.work import BETAS, CLIPPING, LEARNING_RATE, SEED, Step, Work

NO_END = 10**9
"""Steps of a training that ends when the benchmark does."""


class _EndedError(Exception):
    """Leaves `Trainer.train`, which has no other end than its last step."""


class _Batch(Dataset[dict[str, Tensor]]):
    """The rows of the batch of every step: an epoch is a step."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[row], "labels": self._tokens[row]}


class _Timed(TrainerCallback):  # type: ignore[misc]
    """Waits before a step until it may begin, and reports it at its end.

    The time leaves out reading the batch, and holds everything else that the Trainer does for a
    step: forward and backward pass, clipping, optimizer, scheduler, and zeroing gradients.
    """

    def __init__(self, may_begin: Callable[[], bool], report: Callable[[Step], None]) -> None:
        self._may_begin = may_begin
        self._report = report
        self._watch: Stopwatch | None = None
        self.loss = torch.tensor(0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self._may_begin():
            raise _EndedError
        self._watch = Stopwatch()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self._watch is not None, "a step begins before it ends"
        took: Elapsed = self._watch.elapsed()
        self._report(Step(took.seconds, took.cpu_seconds, self.loss.item()))


class _Trainer(Trainer):  # type: ignore[misc]
    """Tells the callback each step's loss."""

    timed: _Timed

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **named)
        self.timed.loss = loss
        return loss


def train(work: Work, may_begin: Callable[[], bool], report: Callable[[Step], None]) -> None:
    """Trains until `may_begin`, which is asked before each step, says no."""
    model = _model(work)
    tokens = work.tokens(model.get_input_embeddings().num_embeddings)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=work.dtype == "bf16",
            per_device_train_batch_size=work.batch_size,
            max_steps=NO_END,
            optim="adamw_torch_fused",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=CLIPPING,
            gradient_checkpointing=work.recomputed,
            gradient_checkpointing_kwargs={"use_reentrant": False} if work.recomputed else None,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=SEED,
        )
        timed = _Timed(may_begin, report)
        trainer = _Trainer(
            model=model, args=arguments, train_dataset=_Batch(tokens), callbacks=[timed]
        )
        trainer.timed = timed
        try:
            trainer.train()
        except _EndedError:
            return


def _model(work: Work) -> Any:
    """The base, or with adapters on all linear maps in its layers."""
    torch.manual_seed(SEED)
    model: Any = AutoModelForCausalLM.from_pretrained(
        work.base,
        dtype=torch.float32,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    # Training reads no cache, and filling one would take time and memory.
    model.config.use_cache = False
    if work.method == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=work.rank,
            lora_alpha=work.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, adapters)
    return model
