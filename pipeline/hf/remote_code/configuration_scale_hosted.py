"""The configuration of a base that transformers computes, with an expansion beside its blocks."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from .configuration_scale import NEEDED  # noqa: F401  # refuses an older transformers


class HostedScaleConfig(PretrainedConfig):  # type: ignore[misc]
    """Entries: `base_config` is the base's own config.json, and `base_class` the class of
    transformers that computes it. `structure` says beside which of its modules what stands: the
    `layers` in order, each with its `name` and its `blocks`, the module `output` of the logits, and
    whether a layer attends to the keys of another one; and which `linear_maps` and `norms` of a
    layer, and which `last_norms` after the layers, have open weights.
    `media_token_ids` stand where the base reads pictures or sound, which a gate leaves to it. The
    other entries are of the expansion, of such weights and of the gate, as in a ScaleConfig.
    """

    model_type = "scale_hosted"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 2
    head_dim: int = 8
    max_position_embeddings: int = 512
    expansion_hidden_size: int = 32
    expansion_intermediate_size: int = 86
    expansion_num_attention_heads: int = 4
    expansion_num_key_value_heads: int = 4
    l_fp: int = 2
    collaborative_modules: list[str] | tuple[str, ...] = ()
    norm_eps: float = 1e-6
    hidden_act: str = "silu"
    frequencies: list[float] | tuple[float, ...] = ()
    base_class: str = ""
    base_config: Any = None
    structure: Any = None
    media_token_ids: list[int] | tuple[int, ...] = ()
    own_first_layer: int | None = None
    own_rows: int = 0
    own_gains: bool = False
    own_rank: int | None = None
    own_scale: float = 1.0
    gate_layer: int | None = None
    gate_features: str = "token"
    gate_decay: float = 0.8
    gate_bias: float = 0.0
    gate_threshold: float = 0.0
    gate_open_ids: bool = False
    base_vocab_size: int | None = None

    def __init__(self, **kwargs: Any) -> None:
        for name in HostedScaleConfig.__annotations__:
            setattr(self, name, kwargs.pop(name, getattr(HostedScaleConfig, name)))
        super().__init__(**kwargs)

    def is_collaborative(self, layer: int, module: str) -> bool:
        """Whether `module` of `layer` has expansion_to_base blocks."""
        return layer >= self.l_fp and module in self.collaborative_modules
