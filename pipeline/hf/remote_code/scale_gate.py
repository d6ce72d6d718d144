"""The gate: which tokens are new to the base, by a linear score of the base's own stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_scale import ScaleConfig
from .scale_caches import GateCache, layer_of
from .scale_math import gate_scores, running_mean, stream_over_rms


class ScaleGate(nn.Module):
    """Which tokens are open, by a linear score of the base's x [B, S, D].

    Read are x over its root mean square, standardised, and with `token+running_mean` also its mean
    over the text so far, in which each token counts less by `gate_decay` with every token after it.
    All is computed in fp32. Ids that old text never has are open whatever the score: `opens_id`.

    A gate was fitted, and does not train: its tensors are buffers, which optimizers and their
    weight decay leave alone, and which casting the model leaves in fp32.
    """

    mean: Tensor
    std: Tensor
    weight: Tensor
    is_open_id: Tensor | None

    def __init__(self, config: ScaleConfig) -> None:
        super().__init__()
        self.decay = config.gate_decay
        self.bias = config.gate_bias
        self.threshold = config.gate_threshold
        self.has_mean = config.gate_features == "token+running_mean"
        size = config.hidden_size * (2 if self.has_mean else 1)
        for name in ("mean", "std", "weight"):
            # Made of integers: under DeepSpeed's `zero.Init` a new tensor of floats has 16 bits.
            bits = torch.zeros(size, dtype=torch.int32)
            self.register_buffer(name, bits.view(torch.float32))
        self.std.fill_(1)
        table: Tensor | None = None
        if config.gate_open_ids:
            # [V] of the base's vocabulary, yet to be read from the folder.
            table = torch.zeros(config.base_vocab_size or config.vocab_size, dtype=torch.bool)
        self.register_buffer("is_open_id", table)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves the gate as any module, in its types: in 16 bits it would decide otherwise."""
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, values in exact.items():
            moved = self.get_buffer(name)
            if moved.dtype != values.dtype:
                self.register_buffer(name, values.to(moved.device))
        return self

    def forward(
        self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: GateCache | None
    ) -> Tensor:
        """Whether each token is open by its score: bool [B, S, 1]; see `scores`."""
        return self.scores(x, is_text, documents, cache) > self.threshold

    def decide(
        self,
        x: Tensor,
        is_text: Tensor | None,
        documents: Tensor | None,
        layers: list[Any] | None,
        by_id: Tensor | None = None,
    ) -> Tensor:
        """Whether each token is open, by its score or `by_id`: bool [B, S, 1].

        `layers` are a cache's, which get one for the running mean; the rest is as in `scores`.
        """
        cache: GateCache | None = None
        if layers is not None and self.has_mean:
            cache = layer_of(GateCache, layers)
        opens: Tensor = self(x, is_text, documents, cache)
        if is_text is not None:
            opens = opens & is_text.unsqueeze(-1).to(opens.device)
        if by_id is not None:
            opens = opens | by_id.to(opens.device)
        return opens

    def opens_id(self, tokens: Tensor, is_text: Tensor | None = None) -> Tensor | None:
        """Whether each of the tokens [B, S] is open by its id, and no padding: bool [B, S, 1];
        None: no id is.
        """
        if self.is_open_id is None:
            return None
        tokens = tokens.to(self.is_open_id.device).unsqueeze(-1)
        # Ids behind the base's are new tokens, its own or another expansion's.
        last = len(self.is_open_id) - 1
        # The library loads all of a gate in fp32, this table too.
        by_id = self.is_open_id[tokens.clamp(max=last)].bool() & (tokens <= last)
        return by_id if is_text is None else by_id & is_text.unsqueeze(-1).to(by_id.device)

    def scores(
        self, x: Tensor, is_text: Tensor | None, documents: Tensor | None, cache: GateCache | None
    ) -> Tensor:
        """The log odds that each token is new, [B, S, 1].

        Args:
            x: [B, S, D], the base's stream.
            is_text: bool [B, S], false for padding; None: all is text.
            documents: [B, S], equal numbers for the tokens of one document; None: each row is one.
            cache: what the running mean reads of earlier tokens, to which these are added; None:
                there are none.

        Raises:
            ValueError: the gate was rounded, and would decide otherwise.
        """
        if self.weight.dtype != torch.float32:
            raise ValueError(
                f"the gate (token_gate): expected torch.float32, found {self.weight.dtype}, in "
                "which it would open for other text; whatever casts buffers, such as FSDP1's "
                "buffer_dtype, must leave it alone"
            )
        features = stream_over_rms(x)
        if self.has_mean:
            mean = self._running_mean(features, is_text, documents, cache)
            features = torch.cat([features, mean], dim=-1)
        return gate_scores(features, self.mean, self.std, self.weight, self.bias).unsqueeze(-1)

    def _running_mean(
        self,
        values: Tensor,
        is_text: Tensor | None,
        documents: Tensor | None,
        cache: GateCache | None,
    ) -> Tensor:
        length = values.shape[1]
        if is_text is None:
            counts = values.new_ones(*values.shape[:2], 1)
        else:
            counts = is_text.to(values).unsqueeze(-1)
        if cache is not None:
            read_values, read_counts = cache.update(values.unsqueeze(1), counts.unsqueeze(1))
            values = read_values[:, 0]
            counts = read_counts[:, 0]
        return running_mean(values, documents, counts, self.decay)[:, -length:]


def texts_of(
    x: Tensor, attention_mask: Any, position_ids: Tensor, cache: Any
) -> tuple[Tensor | None, Tensor | None]:
    """What a gate reads beside x [B, S, D]: which tokens are text and no padding, and of which
    document each token is.

    Both are [B, S]. None: all are text, or of one document in each row.
    """
    is_text: Tensor | None = None
    documents: Tensor | None = None
    if attention_mask is None and cache is None:
        # As for attention (`create_causal_mask`): positions that begin again are another text in
        # the same row.
        breaks = position_ids.expand(x.shape[:2]).diff(dim=1) != 1
        documents = F.pad(breaks.cumsum(dim=1), (1, 0))
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        is_text = attention_mask[:, -x.shape[1] :].bool()
    return is_text, documents
