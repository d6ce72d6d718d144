"""Which weights only open tokens read: rows, gains, low-rank differences (docs/open_weights.md).

This is what a configuration or an export says of them, without tensors. Their modules are in
`pipeline.model.open_weights`. In files (config.json, tensors) their names begin with `own`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.method import Lora, ScaleMethod
from pipeline.errors import ConfigError

UNGATED_REASON = (
    "method.open_rows, open_gains, low_rank: tokens read them where a gate opens, and this model "
    "has no gate (leave --without-gate out)"
)
"""Why a format that computes them for open tokens takes no model without a gate."""


@dataclass(frozen=True)
class OpenWeights:
    """What tokens have of their own where a gate opens them.

    Attributes:
        first_layer: the first layer with such weights; the difference of an input row is added to x
            as it enters this layer.
        tokens: the ids that have rows of their own; all other ids share one more row. None: there
            are no open rows.
        gains: whether norms have differences of their gains.
        low_rank: the rank of the differences s B A of linear maps; None: there are none.
        low_rank_scale: the factor s.
        low_rank_maps: the names of the maps with such a difference; None: all.
    """

    first_layer: int
    tokens: tuple[int, ...] | None = None
    gains: bool = False
    low_rank: int | None = None
    low_rank_scale: float = 1.0
    low_rank_maps: tuple[str, ...] | None = None

    def low_rank_of(self, map_name: str) -> int | None:
        """The rank of the difference of the maps of that name; None: they have none."""
        if self.low_rank_maps is not None and map_name not in self.low_rank_maps:
            return None
        return self.low_rank

    def unmerged_reason(self, model_type: str, *, widened: bool, norms_heads: bool) -> str | None:
        """Why they do not add to the weights of a base of `model_type`; None if they do.

        In an ordinary model every token reads them, as in training.

        Args:
            model_type: the base's.
            widened: whether an expansion adds heads to the base's.
            norms_heads: whether the base normalises each head of queries and keys.
        """
        if self.tokens is not None and self.first_layer > 0:
            return (
                f"method.open_rows: they enter before layer {self.first_layer}, where an ordinary "
                "model reads no embedding (a run whose open weights begin at layer 0 allows it)"
            )
        if self.gains and widened and norms_heads:
            return (
                f"method.open_gains: bases of model_type {model_type} normalise each head of "
                "queries and keys, with one gain for all heads, which added heads share with "
                "closed tokens"
            )
        return None

    def config_entries(self, added_tokens: int = 0) -> dict[str, Any]:
        """The entries of an export's config.json. Inverse: `open_weights_in`, but for the tokens.

        Which tokens have rows is a table beside the weights: it may have a hundred thousand ids.
        """
        rows = 0
        if self.tokens is not None:
            rows = len(self.tokens) + 1
            if added_tokens:
                rows += 1  # the row of zeros of new tokens (`OwnRowOfToken`)
        maps = self.low_rank_maps
        return {
            "own_first_layer": self.first_layer,
            "own_rows": rows,
            "own_gains": self.gains,
            "own_rank": self.low_rank,
            "own_scale": self.low_rank_scale,
            "own_maps": None if maps is None else list(maps),
        }


def open_weights_in(
    config: Mapping[str, Any], tokens: tuple[int, ...] | None
) -> OpenWeights | None:
    """The open weights that a config.json describes, if any; `tokens` have rows of their own."""
    if config.get("own_first_layer") is None:
        return None
    maps = config.get("own_maps")
    return OpenWeights(
        first_layer=config["own_first_layer"],
        tokens=tokens,
        gains=config["own_gains"],
        low_rank=config["own_rank"],
        # Exports of earlier versions have neither.
        low_rank_scale=config.get("own_scale", 1.0),
        low_rank_maps=None if maps is None else tuple(maps),
    )


def open_weights_of(
    method: ScaleMethod | Lora, num_layers: int, tokens: tuple[int, ...] | None
) -> OpenWeights | None:
    """The open weights of a run; `tokens` get rows of their own, if the method has any.

    All of LoRA is such weights, also without a gate, where every token is open.

    Raises:
        ConfigError: they begin above the base's last layer.
    """
    first_layer = method.open_first_layer
    rank: int | None
    scale = 1.0
    maps: tuple[str, ...] | None = None
    if isinstance(method, Lora):
        rank = method.rank
        scale = method.scale
        maps = method.target_modules
    else:
        if not method.has_open_weights:
            return None
        rank = method.low_rank
        if first_layer is None:
            first_layer = method.l_fp
    assert first_layer is not None, "ScaleMethod checks that one of both is there"
    if first_layer >= num_layers:
        raise ConfigError(
            f"method.open_first_layer: {first_layer} leaves none of the base's {num_layers} "
            f"layers; use 0 to {num_layers - 1}"
        )
    return OpenWeights(
        first_layer=first_layer,
        tokens=None if method.open_rows is None else tokens,
        gains=method.open_gains,
        low_rank=rank,
        low_rank_scale=scale,
        low_rank_maps=maps,
    )
