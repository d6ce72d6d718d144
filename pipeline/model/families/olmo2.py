"""OLMo 2: norms after attention and FFN, and an RMSNorm over the queries, and the keys, of all heads together."""

from __future__ import annotations

from pipeline.model.families.family import POST_NORM_NAMES, Config, Family, rotary_of, spec_of
from pipeline.model.spec import DecoderSpec, LayerKind


def _read(config: Config) -> DecoderSpec:
    biased = bool(config.attention_bias)
    return spec_of(
        config,
        [LayerKind(rotary_of(config))] * config.num_hidden_layers,
        norm_placement="after",
        query_key_norm="all",
        query_key_value_bias=biased,
        output_bias=biased,
    )


OLMO2 = Family(
    ("olmo2",),
    _read,
    POST_NORM_NAMES,
    why_not_stock="an OLMo 2 base: its query and key norms take one mean square over all heads, the added ones too",
)
