"""A training step of the benchmark `gpu_step`, recorded on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_step.shapes import Shape
from benchmarks.gpu_step.training_step import TrainingStep
from benchmarks.gpu_step.variants import THEIRS, Variant
from benchmarks.ledger.fusion import fused
from benchmarks.ledger.tape import Operation, Tape
from pipeline.extensions.hosted.meta_device import kernels_of_gpus
from pipeline.model import chunked_loss, output
from pipeline.parallel import fused_cross_entropy

META = torch.device("meta")


class RecordedStep(TrainingStep):
    """A step on the meta device, with the optimizer's kernel recorded: that device has none."""

    def __init__(self, variant: Variant, shape: Shape) -> None:
        # Compiled layers run as they are written here; `fused` estimates what a compiler makes.
        super().__init__(variant._replace(compiled=False), shape, META, torch.bfloat16)
        self.tape = Tape(self._model, compiled_layers(self._model) if variant.compiled else ())

    def record(self) -> list[Operation]:
        """The operations of a step."""
        self.allocate()
        with self.tape, self.tape.modules_known():
            self._loss().backward()
            with self.tape.part("optimizer"):
                self._update()
        return fused(self.tape.operations)

    def _make_optimizer(self, masters: Sequence[Tensor]) -> Any:
        return RecordedAdamW(self.tape, masters)


class RecordedAdamW:
    """Fused AdamW: one kernel for all tensors."""

    def __init__(self, tape: Tape, parameters: Sequence[Tensor]) -> None:
        self._tape = tape
        self._parameters = parameters
        self._moments: list[Tensor] = []
        for parameter in parameters:
            self._moments += [torch.empty_like(parameter), torch.empty_like(parameter)]

    def step(self) -> None:
        """Reads parameters, gradients and both moments; writes all but the gradients."""
        changed = [*self._parameters, *self._moments]
        gradients = [parameter.grad for parameter in self._parameters]
        writes = [self._tape.numbered(tensor, tensor.nbytes) for tensor in changed]
        reads = list(writes)
        for gradient in gradients:
            assert gradient is not None
            reads.append(self._tape.numbered(gradient, gradient.nbytes))
        self._tape.add(
            Operation(
                name="_fused_adamw_",
                module="optimizer",
                backward=False,
                kind="pointwise",
                reads=tuple(reads),
                writes=tuple(writes),
            )
        )

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def compiled_layers(model: torch.nn.Module) -> tuple[str, ...]:
    """The paths of the layers that a compiled variant compiles."""
    found: list[str] = []
    for path, _ in model.named_modules():
        if path.rpartition(".")[0].endswith("layers") and path.rpartition(".")[2].isdigit():
            found.append(path)
    return tuple(found)


def recorded(
    variant: Variant, shape: Shape, *, chunk_elements: int, fused_loss: bool = True
) -> list[Operation]:
    """The operations of a step of `variant`.

    Args:
        chunk_elements: how many logits exist at a time.
        fused_loss: whether the loss is the compiled one of our models, or that of single
            operations, as it was when an H100 was measured.
    """
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(output, "GPU_CHUNK_ELEMENTS", chunk_elements)
        if not fused_loss:
            patch.setattr(output, "compiles_by_default", lambda device: False)
            patch.setattr(chunked_loss, "SUMS_16_BITS_IN_FP32", False)
        if variant.method in THEIRS:
            stack.enter_context(kernels_of_gpus())
        step = RecordedStep(variant, shape)
        _compile_loss_as_one_graph_a_pass(step.tape, patch)
        return [_of_documents(operation, shape) for operation in step.record()]


def _of_documents(operation: Operation, shape: Shape) -> Operation:
    """The operation with the FLOPs of attention within documents. Where they begin is a value,
    which the meta device does not have, so that the recorded ones are of whole rows."""
    if operation.kind != "attention":
        return operation
    return replace(operation, flops=int(operation.flops * shape.share_of_pairs))


def _compile_loss_as_one_graph_a_pass(tape: Tape, patch: pytest.MonkeyPatch) -> None:
    """Runs the compiled loss as it is written, and marks its passes: a row of logits is too long to
    stay in a cache between them."""

    def as_one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with tape.one_graph(function.__name__):
                return function(*arguments)

        return run

    patch.setattr(fused_cross_entropy, "_compiled", lambda function: function)
    for name in ("_statistics", "_gradient", "_kl_statistics", "_kl_gradient"):
        patch.setattr(fused_cross_entropy, name, as_one_graph(getattr(fused_cross_entropy, name)))
