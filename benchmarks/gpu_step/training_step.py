"""One training step of a variant, timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_step.models import compiler, our_model, set_randomly, their_model
from benchmarks.gpu_step.shapes import Shape
from benchmarks.gpu_step.variants import THEIRS, Variant
from benchmarks.results import Elapsed, Stopwatch
from pipeline.model.attention import Documents
from pipeline.model.from_hf import read_spec
from pipeline.parallel.parameters import default_dtype


class TrainingStep:
    """A variant's model with one batch: forward pass, loss, backward pass and optimizer step.

    `allocate` must precede `run`. After `release` the parameters hold no memory, but what was
    compiled stays, and the next `allocate` gives them new values.
    """

    def __init__(
        self, variant: Variant, shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._is_theirs = variant.method in THEIRS
        self._model = _build(variant, shape, device, dtype)
        self._sizes: list[int] = []
        self._trained: list[Tensor] = []
        for parameter in self._model.parameters():
            self._sizes.append(parameter.untyped_storage().nbytes())
            if parameter.requires_grad:
                self._trained.append(parameter)

        spec = read_spec(shape.architecture)
        tokens = torch.randint(spec.vocab_size, (shape.batch_size, shape.sequence_length))
        # Rows of one document, too, go through the kernel for packed documents, as in training.
        documents, positions = _packed(shape)
        self._tokens = tokens.to(device)
        self._documents = documents.moved(lambda tensor: tensor.to(device))
        # None: of a row's tokens from its start on. By others transformers finds the documents.
        self._positions = None if shape.documents is None else positions.to(device)

    @property
    def trained_parameters(self) -> int:
        """How many values the optimizer updates."""
        return sum(parameter.numel() for parameter in self._trained)

    @torch.no_grad()
    def allocate(self) -> None:
        """Gives the parameters memory and random values, and makes a new optimizer."""
        for parameter, size in zip(self._model.parameters(), self._sizes, strict=True):
            parameter.untyped_storage().resize_(size)
            set_randomly(parameter)
        # 16-bit weights have fp32 masters, which the optimizer updates, as under DeepSpeed.
        self._masters = self._trained
        if self._dtype != torch.float32:
            self._masters = [parameter.detach().float() for parameter in self._trained]
        self._optimizer = self._make_optimizer(self._masters)

    def _make_optimizer(self, masters: Sequence[Tensor]) -> Any:
        return torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def run(self) -> Elapsed:
        """Makes a step. Returns the time that it took."""
        # Kernels of a GPU run after the call that starts them returns: without waiting, a step's
        # time would hold the end of the step before, and lack its own.
        self._synchronize()
        watch = Stopwatch()
        self._loss().backward()
        self._update()
        self._synchronize()
        return watch.elapsed()

    def _loss(self) -> Tensor:
        """The mean loss over the batch's tokens."""
        if self._is_theirs:
            loss: Tensor = self._model(
                input_ids=self._tokens, labels=self._tokens, position_ids=self._positions
            ).loss
            return loss
        # Tokens as their own targets: shifting them, as transformers does, changes no work.
        total: Tensor = self._model(
            self._tokens, self._tokens, self._positions, self._documents
        ).total
        return total / self._tokens.numel()

    @torch.no_grad()
    def _update(self) -> None:
        """The optimizer's step, from the gradients of the parameters."""
        for parameter, master in zip(self._trained, self._masters, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            # One 16-bit gradient after another is freed, so that they are not all held beside the
            # fp32 ones.
            parameter.grad = None
            master.grad = gradient.to(master.dtype)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._masters is not self._trained:
            torch._foreach_copy_(self._trained, self._masters)

    def _synchronize(self) -> None:
        """Waits until a GPU has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Frees the memory of the parameters, of their gradients and of the optimizer."""
        self._masters = []
        del self._optimizer
        for parameter in self._model.parameters():
            parameter.grad = None
            # The parameter itself stays, as compiled code refers to it.
            parameter.untyped_storage().resize_(0)


def _packed(shape: Shape) -> tuple[Documents, Tensor]:
    """The documents of a batch, and each token's position in its own, [B, S]."""
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    for lengths in shape.document_lengths:
        ids.append([number for number, length in enumerate(lengths) for _ in range(length)])
        positions.append([place for length in lengths for place in range(length)])
    return Documents.of(torch.tensor(ids)), torch.tensor(positions)


def _build(variant: Variant, shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on its device, its values unset."""
    if variant.method in THEIRS:
        with device, default_dtype(dtype):
            return their_model(variant, shape, device)
    # A base that is to be quantised is first built in 16 bits: on the device that would count for
    # the peak of its memory.
    built_on = device if variant.base == "bf16" else torch.device("cpu")
    with built_on, default_dtype(dtype):
        model = our_model(variant.method, read_spec(shape.architecture), shape.l_fp, variant.base)
        if variant.compiled:
            model.compile_layers(compiler(device))
        return model.to(device)
