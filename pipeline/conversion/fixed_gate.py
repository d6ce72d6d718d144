"""The gate of a trained model, whose decisions are fixed while two models are compared.

Rounding may change the decision at a token whose score is near the threshold. Then two correct
models differ by as much as the base from the trained model, at this token and at later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeline.errors import ConversionError
from pipeline.gating.gate import FittedGate


@dataclass(frozen=True)
class FixedGate(FittedGate):
    """A gate that repeats the decisions of its first pass in all later passes over the same batch.

    The order of passes matters: the pass of the model whose decisions count must be the first.

    Attributes:
        passes: the scores of each pass: [N, S].
    """

    passes: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, gate: FittedGate) -> FixedGate:
        """The same gate, without a pass."""
        return cls(
            layer=gate.layer,
            features=gate.features,
            mean=gate.mean,
            std=gate.std,
            weight=gate.weight,
            bias=gate.bias,
            open_ids=gate.open_ids,
            threshold=gate.threshold,
        )

    def is_open(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        self.passes.append(self.scores(x, document_ids))
        return self.passes[0] > self.threshold

    def fix_in(
        self, exported: nn.Module, windows: Sequence[Tensor], folder: str
    ) -> RemovableHandle:
        """Makes the gate of an exported model take the same decisions in its next passes.

        Such a pass raises ConversionError if the export would decide otherwise and rounding does
        not explain it.

        Args:
            exported: the module of the exported model's gate.
            windows: [S] each, the windows of the passes to come, in their order.
            folder: the export, for errors.

        Returns:
            A handle that ends it.
        """
        # Two passes of the trained model, in two precisions. Scores that are nearer to the
        # threshold than the passes differ may fall on either side of it.
        first = self.passes[0]
        rounding = (first - self.passes[1]).abs().max()
        expected: list[Tensor] = []
        for scores, window in zip(first, windows, strict=True):
            # Without the padding of the batch.
            expected.append(scores[: len(window)])
        remaining = iter(expected)

        def replaced(module: nn.Module, inputs: Any, found: Tensor) -> Tensor:
            scores = next(remaining)
            opens = scores > self.threshold
            is_far = (scores - self.threshold).abs() > rounding
            wrong = int((is_far & (opens != found[0, :, 0])).sum())
            if wrong:
                raise ConversionError(
                    f"{folder}: the exported gate decides otherwise than the trained model's on "
                    f"{wrong} of {len(opens)} tokens; not kept"
                )
            return opens.view(1, -1, 1)

        return exported.register_forward_hook(replaced)
