"""The decisions of a gate in verification: the same in every model that is compared, and compared themselves.

Rounding may change the decision at a token whose score is near the threshold. Then two correct models differ by as much
as the base from the trained model, there and at later tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.conversion.trained_model import TrainedModel
from pipeline.errors import ConversionError
from pipeline.scale.gate import Gate


@dataclass(frozen=True)
class DecidedGate(Gate):
    """A gate whose decisions for one batch are taken already: the levels [B, S]."""

    decisions: Tensor = field(default_factory=lambda: torch.zeros(0))

    def levels(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """The decisions, for x: [B, S, D] whatever its values."""
        return self.decisions.to(x.device)


class GateDecisions:
    """The decisions of a model's gate on windows of tokens [S], in `dtype`, and how far rounding moves its scores."""

    def __init__(self, model: TrainedModel, windows: Sequence[Tensor], dtype: torch.dtype, finer: torch.dtype) -> None:
        if model.gate is None:
            raise ValueError(f"{model.checkpoint}: has no gate")
        self.gate = model.gate
        self.scores = model.gate_scores(windows, dtype)
        differences = (a - b for a, b in zip(self.scores, model.gate_scores(windows, finer), strict=True))
        self.rounding = max(float(difference.abs().max()) for difference in differences)
        self.levels = [model.gate.levels_of(score) for score in self.scores]

    def fixed_in(self, model: TrainedModel) -> TrainedModel:
        """The model with these decisions, for all windows as one batch."""
        decisions = nn.utils.rnn.pad_sequence(self.levels, batch_first=True)
        values = {part.name: getattr(self.gate, part.name) for part in fields(Gate)}
        return replace(model, gate=DecidedGate(**values, decisions=decisions))

    @contextmanager
    def fixed_in_export(self, exported: nn.Module, folder: str) -> Iterator[Callable[[int], None]]:
        """Within the block the exported model takes these decisions, of the window whose number the function was told.

        Raises, at a forward pass:
            ConversionError: the export would decide otherwise where no rounding explains it.
        """
        current = 0

        def decide(number: int) -> None:
            nonlocal current
            current = number

        def replaced(module: nn.Module, inputs: Any, found: Tensor) -> Tensor:  # noqa: ANN401
            levels, scores = self.levels[current].to(found.device), self.scores[current].to(found.device)
            limits = [limit for limit in (self.gate.threshold, self.gate.lower) if limit is not None]
            far = torch.stack([(scores - limit).abs() for limit in limits]).amin(0) > self.rounding
            if wrong := int((far & (levels != found[0, :, 0])).sum()):
                raise ConversionError(
                    f"{folder}: the exported gate decides otherwise than the trained model's on {wrong} of "
                    f"{len(levels)} tokens; not kept"
                )
            return levels.view(1, -1, 1)

        hook = exported.get_submodule("token_gate").register_forward_hook(replaced)
        try:
            yield decide
        finally:
            hook.remove()
