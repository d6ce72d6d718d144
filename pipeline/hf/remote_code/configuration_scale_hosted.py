"""The configuration of a base that transformers computes, with an expansion beside its blocks."""

from __future__ import annotations

from typing import Any

from .configuration_scale import AddedConfig


class HostedScaleConfig(AddedConfig):
    """Entries: `base_config` is the base's own config.json, and `base_class` the class of
    transformers that computes it. `structure` says beside which of its modules what stands: the
    `layers` in order, each with its `name` and its `blocks`, the module `output` of the logits, and
    whether a layer attends to the keys of another one; and which `linear_maps` and `norms` of a
    layer, and which `last_norms` after the layers, have open weights.
    `media_token_ids` stand where the base reads pictures or sound, which a gate leaves to it. The
    other entries are of the expansion, of such weights and of the gate, as in a ScaleConfig.
    """

    model_type = "scale_hosted"
    norm_eps: float = 1e-6
    frequencies: list[float] | tuple[float, ...] = ()
    base_class: str = ""
    base_config: Any = None
    structure: Any = None
    media_token_ids: list[int] | tuple[int, ...] = ()

    def __init__(self, **kwargs: Any) -> None:
        self.take_entries(kwargs)
        super().__init__(**kwargs)
