"""What a gate reads of windows of text: the base's stream."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.config.run import GateFeatures
from pipeline.gating.windows import Windows
from pipeline.log import progress_bar
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.scale.gate import Gate, gate_features

GROUP_TOKENS = 2**15
"""How many tokens pass the model together."""


class BaseStream:
    """The base's stream before `layer` of a decoder, which must have it there exactly."""

    def __init__(self, decoder: Decoder, layer: int) -> None:
        self.device = decoder.embedding.base.weight.device
        self.layer = layer
        self.decoder = decoder

    def features(self, windows: Windows, kind: GateFeatures) -> tuple[Tensor, Tensor]:
        """The features [T, F] of the T tokens that are no padding, in fp32 on the CPU, and which are new: bool [T]."""
        found = [
            gate_features(stream, kind, group.document_ids.to(self.device))[group.present.to(self.device)].cpu()
            for group, stream in self._streams(windows, "reading the base's states")
        ]
        return torch.cat(found), windows.is_new[windows.present]

    def scores(self, windows: Windows, gate: Gate) -> Tensor:
        """The gate's scores: [N, S], on the CPU."""
        found = self._streams(windows, "testing the gate")
        return torch.cat([gate.scores(x, group.document_ids.to(self.device)).cpu() for group, x in found])

    def _streams(self, windows: Windows, what: str) -> Iterator[tuple[Windows, Tensor]]:
        with progress_bar(what, windows.tokens.numel(), " tokens") as bar:
            for group in windows.groups(GROUP_TOKENS):
                tokens, positions = (tensor.to(self.device) for tensor in (group.tokens, group.positions))
                yield group, self.decoder.base_stream(tokens, positions, group.documents(self.device), layer=self.layer)
                bar.update(group.tokens.numel())


def inference_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inference_dtype(base: BaseFolder, device: torch.device) -> torch.dtype:
    """The base's own type on a GPU; fp32 on a CPU, which is slow in 16 bits."""
    return base.dtype if device.type == "cuda" else torch.float32
