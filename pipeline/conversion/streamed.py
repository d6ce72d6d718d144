"""The training model computing logits while only one of its layers is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from pipeline.conversion.trained_model import TrainedModel, skeleton


class StreamedDecoder:
    """A decoder of any size in `dtype`: each module gets its weights when its turn comes, and loses them after it."""

    def __init__(self, model: TrainedModel, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.decoder = skeleton(model.method, model.base).to(dtype).eval()
        for name, module in self._units():
            module.register_forward_pre_hook(self._filler(name))
            module.register_forward_hook(_empty)

    def _units(self) -> Iterator[tuple[str, nn.Module]]:
        """What is in memory at a time."""
        yield "embedding.", self.decoder.embedding
        yield from ((f"layers.{index}.", layer) for index, layer in enumerate(self.decoder.layers))
        yield "final_norm.", self.decoder.final_norm

    @torch.no_grad()
    def logits(self, windows: Sequence[Tensor]) -> list[Tensor]:
        """The logits [S, V] in fp32 of each window of tokens [S]. All windows pass a layer together."""
        tokens = nn.utils.rnn.pad_sequence(list(windows), batch_first=True)
        hidden = self.decoder.hidden_states(tokens)
        output = self.decoder.output
        self._fill(output, "output.")
        starts = range(0, tokens.numel(), tokens.shape[1])
        logits = [
            output.logits(hidden.rows(slice(start, start + len(window))))
            for start, window in zip(starts, windows, strict=True)
        ]
        _empty(output)
        return logits

    def _filler(self, prefix: str) -> Callable[[nn.Module, object], None]:
        return lambda module, _: self._fill(module, prefix)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        for path, owner in module.named_modules():
            for name in owner._parameters:
                full_name = prefix + ".".join(filter(None, (path, name)))
                if owner._parameters[name] is not None:
                    owner._parameters[name] = nn.Parameter(self._read(full_name), requires_grad=False)

    def _read(self, name: str) -> Tensor:
        # A tied output projection has no values of its own.
        return self.model.read(name if name in self.model.shapes else "embedding.base.weight").to(self.dtype)


def _empty(module: nn.Module, *_: object) -> None:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
