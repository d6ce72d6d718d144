"""The work that both contestants do: a base, a batch, a method, a type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Method = Literal["fft", "lora", "preserve"]
Dtype = Literal["fp32", "bf16"]
Side = Literal["ours", "theirs"]
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
CLIPPING = 1.0
SEED = 0
UNPREDICTED = -100


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Attributes:
        base: the folder of the base, with weights in fp32.
        method: Preserve has nothing that does the same: beside it transformers fine-tunes fully.
        dtype: bf16 has fp32 masters with us, and is autocast with transformers' Trainer.
        recomputed: whether the backward pass recomputes the layers.
        rank: LoRA's, on all linear maps in the layers.
        batch_size: rows of a step, which is one micro-batch.
        sequence_length: tokens of a row; each row is one document.
        threads: of a process.
    """

    base: Path
    method: Method
    dtype: Dtype
    recomputed: bool
    rank: int
    batch_size: int
    sequence_length: int
    threads: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    def tokens(self, vocab_size: int) -> Tensor:
        """The batch of every step: [B, S]."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (self.batch_size, self.sequence_length)
        return torch.randint(vocab_size, shape, generator=generator)


class Step(NamedTuple):
    """What a step took.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of all threads of the process.
        loss: the mean nll of the predicted tokens before the step changed the weights.
    """

    seconds: float
    cpu_seconds: float
    loss: float
