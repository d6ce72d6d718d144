"""The configuration of a base with the full difference of a model that was trained from it."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_scale import NEEDED  # checks the version of transformers

__all__ = ["NEEDED", "DifferenceConfig"]


class DifferenceConfig(PretrainedConfig):  # type: ignore[misc]
    """`text_config` is the base's own configuration, of its own class.

    The difference has `bits` bits an element of a matrix within layers, and `own_rows` rows of
    embedding and output. `unpacked` says when base and difference are added: `once`, when a text
    first opens, which holds a second set of weights, or `by_layer`, each time that a layer runs.
    The entries `gate_...` are the gate's, which reads the base's stream before layer `gate_layer`.
    """

    model_type = "scale_difference"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    # So that what is asked for at loading, such as attn_implementation, reaches the base.
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        text_config = kwargs.pop("text_config", None)
        if text_config is None:
            text_config = {"model_type": "llama"}
        if isinstance(text_config, dict):
            entries = dict(text_config)
            text_config = CONFIG_MAPPING[entries.pop("model_type")](**entries)
        self.text_config: PretrainedConfig = text_config
        self.bits: int = kwargs.pop("bits", 4)
        self.own_rows: int = kwargs.pop("own_rows", 1)
        self.unpacked: str = kwargs.pop("unpacked", "once")
        self.gate_layer: int = kwargs.pop("gate_layer", 1)
        self.gate_features: str = kwargs.pop("gate_features", "token")
        self.gate_decay: float = kwargs.pop("gate_decay", 0.8)
        self.gate_bias: float = kwargs.pop("gate_bias", 0.0)
        self.gate_threshold: float = kwargs.pop("gate_threshold", 0.0)
        self.gate_open_ids: bool = kwargs.pop("gate_open_ids", False)
        # All tokens are the base's.
        self.base_vocab_size: int | None = kwargs.pop("base_vocab_size", None)
        if self.unpacked not in ("once", "by_layer"):
            raise ValueError(f"unpacked: expected once or by_layer, found {self.unpacked!r}")
        kwargs["tie_word_embeddings"] = text_config.tie_word_embeddings
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """The channels of the stream that the gate reads."""
        size: int = self.text_config.hidden_size
        return size

    @property
    def vocab_size(self) -> int:
        size: int = self.text_config.vocab_size
        return size

    @property
    def num_hidden_layers(self) -> int:
        count: int = self.text_config.num_hidden_layers
        return count

    @property
    def max_position_embeddings(self) -> int:
        length: int = self.text_config.max_position_embeddings
        return length
