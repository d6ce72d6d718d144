"""The configuration of a model widened by SCALE."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig
from transformers.utils.versions import require_version

NEEDED = "5.4.0"
"""The oldest transformers that runs this code."""
# transformers imports this file first; an older one would fail at an import of the others.
require_version(
    f"transformers>={NEEDED}", "This model's code needs it: pip install -U transformers"
)


class AddedConfig(PretrainedConfig):  # type: ignore[misc]
    """What is added to a base: the entries that all models on a frozen base have."""

    # A list: `Trainer.evaluate` and `predict` append to it.
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
    base_vocab_size: int | None = None
    hidden_act: str = "silu"
    gate_layer: int | None = None
    gate_features: str = "token"
    gate_decay: float = 0.8
    gate_bias: float = 0.0
    gate_threshold: float = 0.0
    gate_open_ids: bool = False
    own_first_layer: int | None = None
    own_rows: int = 0
    own_gains: bool = False
    own_rank: int | None = None
    own_scale: float = 1.0

    def __init__(self, **kwargs: Any) -> None:
        self.take_entries(kwargs)
        super().__init__(**kwargs)

    def take_entries(self, kwargs: dict[str, Any]) -> None:
        """Takes the entries that the class declares out of `kwargs`; others keep their value."""
        # transformers before and after configurations became dataclasses: both take this.
        for kind in type(self).__mro__:
            if issubclass(kind, AddedConfig):
                for name in kind.__annotations__:
                    setattr(self, name, kwargs.pop(name, getattr(self, name)))

    def is_collaborative(self, layer: int, module: str) -> bool:
        """Whether `module` of `layer` has expansion_to_base blocks."""
        return layer >= self.l_fp and module in self.collaborative_modules


class ScaleConfig(AddedConfig):
    """Sizes: what was added is `expansion_…`. Heads are all heads, as caches are sized by them; the
    rest is the base's. `rotary` lists rotary embeddings as numbers, and `layer_rotary` says which
    of them each layer has (None: none). The FFN of `expert_layers` is the `mixture` of experts. The
    first `base_vocab_size` tokens (None: all) are the base's: Route compares their logits alone, as
    in training.

    With `gate_open_ids` a table beside the weights says which of the base's ids the gate opens
    whatever their score.

    From layer `own_first_layer` on (None: nowhere) tokens that the gate opens read weights of their
    own, differences from the base's: `own_rows` rows of the embedding and of the output (0: none),
    gains of norms (`own_gains`), and linear maps of rank `own_rank` (None: none), which count
    `own_scale` times, of those maps that `own_maps` names (None: all). A model trained by LoRA has
    these alone: its expansion has the size 0.
    """

    model_type = "scale"
    # The name by which other libraries look for a cap on the logits.
    attribute_map = {"final_logit_softcapping": "output_softcap"}  # noqa: RUF012

    intermediate_size: int = 172
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    routed: bool = False
    router_threshold: float = 0.5
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    norm_statistics: str = "separate"
    normed_size: int | None = None
    rest_scale: float = 0.0
    gated_ffn: bool = True
    query_key_value_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    parallel_residual: bool = False
    norm_placement: str = "before"
    gain_offset: bool = False
    rounds_once: bool = False
    query_key_norm: str = "none"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    output_softcap: float | None = None
    layer_types: list[str] | tuple[()] = ()
    sliding_window: int | None = None
    mixture: dict[str, Any] | None = None
    expert_layers: list[int] | tuple[()] = ()
    rotary: list[dict[str, Any]] | tuple[()] = ()
    layer_rotary: list[int | None] | tuple[()] = ()
    own_maps: list[str] | tuple[str, ...] | None = None
    use_cache: bool = True

    def __init__(self, **kwargs: Any) -> None:
        self.take_entries(kwargs)
        # Entries of earlier versions that this code would ignore, and compute something else.
        has_groups = self.mixture is not None and self.mixture.get("groups", 1) > 1
        rotary: Any = self.rotary
        is_dynamic = isinstance(rotary, dict) or any(
            one.get("factor") is not None for one in rotary
        )
        if has_groups or is_dynamic or kwargs.get("gate_lower") is not None:
            raise ValueError(
                "written by an earlier version of this model's code; convert the checkpoint again"
            )
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        self.layer_rotary = self.layer_rotary or [None] * self.num_hidden_layers
        super().__init__(**kwargs)

    def has_own_gains(self, layer: int) -> bool:
        """Whether norms of `layer` have gains for open tokens; `num_hidden_layers`: the last."""
        return self.own_gains and self.own_first_layer is not None and layer >= self.own_first_layer

    def own_rank_of(self, layer: int, name: str) -> int | None:
        """The rank of what open tokens add to the linear map `name` of `layer`; None: nothing."""
        if self.own_first_layer is None or layer < self.own_first_layer:
            return None
        if self.own_maps is not None and name not in self.own_maps:
            return None
        return self.own_rank

    @property
    def first_changed_layer(self) -> int:
        """The first layer in which x may differ from the base's; on Route's preserved path it does
        not.
        """
        if self.own_first_layer is None:
            return self.l_fp
        return min(self.l_fp, self.own_first_layer)

    @property
    def runs_twice_below_gate(self) -> bool:
        """Whether the gate reads above the first changed layer: the base runs beside the model
        between them.
        """
        if self.gate_layer is None or self.routed:
            return False
        return self.gate_layer > self.first_changed_layer

    def backbone_unsupported_reason(self) -> str | None:
        """Why the logits are no product of one hidden state and one matrix; None if they are."""
        has_new_tokens = self.base_vocab_size not in (None, self.vocab_size)
        if self.gate_layer is not None and has_new_tokens and self.output_softcap is not None:
            return (
                "after a token that its gate closes, the new tokens of its vocabulary have no "
                "probability, and its logits are capped, which no cap gives"
            )
        return None

    def packing_unsupported_reason(self) -> str | None:
        """Why the texts of several requests cannot be one row of tokens, as servers batch them;
        None if they can.
        """
        if any(spec["context"] is not None for spec in self.rotary):
            return "its rotary frequencies change with a text's length"
        if self.gate_layer is not None and self.gate_features == "token+running_mean":
            return (
                "its gate reads a running mean, which servers do not cache; fit one with "
                "features: token"
            )
        return None
