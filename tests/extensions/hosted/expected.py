"""Structures of hosted bases by hand, after transformers' modelling code, and small configurations
that have every kind of layer of the type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from pipeline.extensions.hosted.structure import (
    DocumentSeparation,
    HostedBlock,
    HostedLayer,
    HostedStructure,
)

AFTER_A_NORM = 0.5
"""The additivity of a block whose output is normed before it is added: a test allows 0.3 to 0.8."""


def mixer(module_class: str, name: str = "self_attn", **changes: Any) -> HostedBlock:
    """An attention as most types have it: it gets `hidden_states` by name and gives a tuple."""
    values: dict[str, Any] = {"input_argument": "hidden_states", "output_index": 0, **changes}
    return HostedBlock(name, module_class, "mixer", name, **values)


def recurrent(module_class: str, name: str = "linear_attn", **changes: Any) -> HostedBlock:
    """A linear attention, a state space or a convolution, which gives a tensor."""
    return mixer(module_class, name, output_index=None, **changes)


def ffn(module_class: str, name: str = "mlp", **changes: Any) -> HostedBlock:
    """An FFN as most types have it: after the attention, with its input by position."""
    values: dict[str, Any] = {"input_argument": 0, "reads": (0,), "input_module": name, **changes}
    return HostedBlock(name, module_class, "ffn", **values)


@dataclass(frozen=True)
class Expected:
    """A configuration and the structure of its model.

    `layers` are the blocks of each layer, with the class of the layer before them.
    """

    config: Callable[[], PretrainedConfig]
    model_class: str
    layers: Sequence[tuple[str, Sequence[HostedBlock]]]
    documents: DocumentSeparation = "positions"
    layer_list: str = "model.layers"
    embedding: str = "model.embed_tokens"

    def structure(self) -> HostedStructure:
        """The whole structure."""
        config = self.config()
        layers: list[HostedLayer] = []
        for index, (module_class, blocks) in enumerate(self.layers):
            layers.append(HostedLayer(index, module_class, tuple(blocks)))
        return HostedStructure(
            model_type=config.model_type,
            model_class=self.model_class,
            hidden_size=config.get_text_config().hidden_size,
            layer_list=self.layer_list,
            layers=tuple(layers),
            embedding=self.embedding,
            output="lm_head",
            documents=self.documents,
        )


def _config(model_type: str, **values: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        return CONFIG_MAPPING[model_type](**values)

    return make


def _alike(prefix: str, count: int = 2, **attention: Any) -> list[tuple[str, list[HostedBlock]]]:
    """Layers as Llama's, of the classes that a type names after itself."""
    blocks = [mixer(f"{prefix}Attention", **attention), ffn(f"{prefix}MLP")]
    return [(f"{prefix}DecoderLayer", blocks)] * count


def _gemma(prefix: str, count: int, **attention: Any) -> list[tuple[str, list[HostedBlock]]]:
    """Layers with norms before and after attention and FFN."""
    blocks = [
        mixer(f"{prefix}Attention", additivity=AFTER_A_NORM, **attention),
        ffn(f"{prefix}MLP", additivity=AFTER_A_NORM),
    ]
    return [(f"{prefix}DecoderLayer", blocks)] * count


def _hybrid(prefix: str, ffn_class: str) -> list[tuple[str, list[HostedBlock]]]:
    """Three layers of gated delta nets, and one of attention."""
    linear = [recurrent(f"{prefix}GatedDeltaNet"), ffn(ffn_class)]
    full = [mixer(f"{prefix}Attention"), ffn(ffn_class)]
    layer = f"{prefix}DecoderLayer"
    return [(layer, linear)] * 3 + [(layer, full)]


_GEMMA4_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {"num_hidden_layers": 6, "layer_types": _GEMMA4_TYPES * 2, "num_kv_shared_layers": 3}
_GEMMA4_LAYERS = [
    *_gemma("Gemma4Text", 3),
    *_gemma("Gemma4Text", 3, shares_keys=True),
]
_DEEPSEEK_DENSE = [mixer("DeepseekV3Attention"), ffn("DeepseekV3MLP")]
_DEEPSEEK_MIXTURE = [mixer("DeepseekV3Attention"), ffn("DeepseekV3MoE")]
_GLM_DENSE = [mixer("Glm4MoeLiteAttention"), ffn("Glm4MoeLiteMLP")]
_GLM_MIXTURE = [mixer("Glm4MoeLiteAttention"), ffn("Glm4MoeLiteMoE")]
_LLAMA4 = "Llama4TextDecoderLayer"
_LLAMA4_DENSE = [mixer("Llama4TextAttention"), ffn("Llama4TextMLP", "feed_forward")]
_LLAMA4_MIXTURE = [
    mixer("Llama4TextAttention"),
    ffn("Llama4TextMoe", "feed_forward", output_index=0),  # with the router's scores
]
_LFM2_CONVOLUTION = [recurrent("Lfm2ShortConv", "conv"), ffn("Lfm2MLP", "feed_forward")]
_LFM2_ATTENTION = [mixer("Lfm2Attention"), ffn("Lfm2MLP", "feed_forward")]
# Norms before a linear attention and its FFN, but after attention and its FFN.
_OLMO_LINEAR = [
    recurrent("OlmoHybridGatedDeltaNet"),
    ffn("OlmoHybridMLP"),
]
_OLMO_FULL = [
    mixer("OlmoHybridAttention", additivity=AFTER_A_NORM),
    ffn("OlmoHybridMLP", additivity=AFTER_A_NORM),
]

QUICK: dict[str, Expected] = {
    "gemma3": Expected(  # a wrapper with a vision tower
        lambda: CONFIG_MAPPING["gemma3"](
            text_config={
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            }
        ),
        "Gemma3ForConditionalGeneration",
        _gemma("Gemma3", 3),
        layer_list="model.language_model.layers",
        embedding="model.language_model.embed_tokens",
    ),
    "deepseek_v3": Expected(  # latent attention
        _config("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1),
        "DeepseekV3ForCausalLM",
        [
            ("DeepseekV3DecoderLayer", _DEEPSEEK_DENSE),
            ("DeepseekV3DecoderLayer", _DEEPSEEK_MIXTURE),
            ("DeepseekV3DecoderLayer", _DEEPSEEK_MIXTURE),
        ],
    ),
    "qwen3_next": Expected(  # linear attention
        _config("qwen3_next", num_hidden_layers=4),
        "Qwen3NextForCausalLM",
        _hybrid("Qwen3Next", "Qwen3NextSparseMoeBlock"),
        documents="one_document",
    ),
    "mamba2": Expected(  # a state space
        _config("mamba2", num_hidden_layers=2),
        "Mamba2ForCausalLM",
        [("Mamba2Block", [recurrent("Mamba2Mixer", "mixer", input_argument=0)])] * 2,
        documents="one_document",
        layer_list="backbone.layers",
        embedding="backbone.embeddings",
    ),
    "qwen3_moe": Expected(  # a mixture
        _config("qwen3_moe", num_hidden_layers=2),
        "Qwen3MoeForCausalLM",
        [
            (
                "Qwen3MoeDecoderLayer",
                [mixer("Qwen3MoeAttention"), ffn("Qwen3MoeSparseMoeBlock")],
            )
        ]
        * 2,
    ),
}

FULL: dict[str, Expected] = {
    "gemma4": Expected(  # a wrapper; the last layers attend to keys of earlier ones
        _config("gemma4", text_config=_GEMMA4),
        "Gemma4ForConditionalGeneration",
        _GEMMA4_LAYERS,
        layer_list="model.language_model.layers",
        embedding="model.language_model.embed_tokens",
    ),
    "gemma4_text": Expected(  # experts beside the FFN
        _config(
            "gemma4_text",
            num_hidden_layers=3,
            layer_types=_GEMMA4_TYPES,
            enable_moe_block=True,
            num_experts=16,
            top_k_experts=4,
            moe_intermediate_size=256,
        ),
        "Gemma4ForCausalLM",
        [
            (layer, [*blocks, ffn("Gemma4TextExperts", "experts", additivity=AFTER_A_NORM)])
            for layer, blocks in _gemma("Gemma4Text", 3)
        ],
    ),
    "qwen3_5": Expected(
        _config("qwen3_5", text_config={"num_hidden_layers": 4}),
        "Qwen3_5ForCausalLM",
        _hybrid("Qwen3_5", "Qwen3_5MLP"),
        documents="one_document",
    ),
    "qwen3_5_moe": Expected(
        _config("qwen3_5_moe", text_config={"num_hidden_layers": 4}),
        "Qwen3_5MoeForCausalLM",
        _hybrid("Qwen3_5Moe", "Qwen3_5MoeSparseMoeBlock"),
        documents="one_document",
    ),
    "gpt_oss": Expected(  # windows in every other layer, and no positions in its masks
        _config("gpt_oss", num_hidden_layers=2),
        "GptOssForCausalLM",
        [("GptOssDecoderLayer", [mixer("GptOssAttention"), ffn("GptOssMLP", output_index=0)])] * 2,
        documents="layer_masks",
    ),
    "glm4_moe_lite": Expected(
        _config(
            "glm4_moe_lite", num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"]
        ),
        "Glm4MoeLiteForCausalLM",
        [
            ("Glm4MoeLiteDecoderLayer", _GLM_DENSE),
            ("Glm4MoeLiteDecoderLayer", _GLM_MIXTURE),
            ("Glm4MoeLiteDecoderLayer", _GLM_MIXTURE),
        ],
    ),
    "granite": Expected(
        _config("granite", num_hidden_layers=2), "GraniteForCausalLM", _alike("Granite")
    ),
    "hyperclovax": Expected(
        _config("hyperclovax", num_hidden_layers=2),
        "HyperCLOVAXForCausalLM",
        _gemma("HyperCLOVAX", 2),
    ),
    "cohere2": Expected(  # the FFN beside the attention
        _config("cohere2", num_hidden_layers=4),
        "Cohere2ForCausalLM",
        [("Cohere2DecoderLayer", [mixer("Cohere2Attention"), ffn("Cohere2MLP", reads=())])] * 4,
    ),
    "llama4_text": Expected(
        _config("llama4_text", num_hidden_layers=4, interleave_moe_layer_step=2),
        "Llama4ForCausalLM",
        [(_LLAMA4, _LLAMA4_DENSE), (_LLAMA4, _LLAMA4_MIXTURE)] * 2,
    ),
    "falcon_h1": Expected(  # a state space and attention, both on the layer's input
        _config("falcon_h1", num_hidden_layers=2),
        "FalconH1ForCausalLM",
        [
            (
                "FalconH1DecoderLayer",
                [
                    recurrent("FalconH1Mixer", "mamba"),
                    mixer("FalconH1Attention"),
                    ffn("FalconH1MLP", "feed_forward", reads=(0, 1)),
                ],
            )
        ]
        * 2,
        documents="one_document",
    ),
    "lfm2": Expected(
        _config("lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]),
        "Lfm2ForCausalLM",
        [
            ("Lfm2DecoderLayer", _LFM2_CONVOLUTION),
            ("Lfm2DecoderLayer", _LFM2_ATTENTION),
            ("Lfm2DecoderLayer", _LFM2_CONVOLUTION),
        ],
        documents="one_document",
    ),
    "olmo_hybrid": Expected(
        _config("olmo_hybrid", num_hidden_layers=4),
        "OlmoHybridForCausalLM",
        [
            *[("OlmoHybridLinearAttentionDecoderLayer", _OLMO_LINEAR)] * 3,
            ("OlmoHybridAttentionDecoderLayer", _OLMO_FULL),
        ],
        documents="one_document",
    ),
    "starcoder2": Expected(
        _config("starcoder2", num_hidden_layers=2), "Starcoder2ForCausalLM", _alike("Starcoder2")
    ),
    "phi": Expected(
        _config("phi", num_hidden_layers=2),
        "PhiForCausalLM",
        [("PhiDecoderLayer", [mixer("PhiAttention"), ffn("PhiMLP", reads=())])] * 2,
    ),
    "gpt2": Expected(
        _config("gpt2", n_layer=2),
        "GPT2LMHeadModel",
        [("GPT2Block", [mixer("GPT2Attention", "attn", input_argument=0), ffn("GPT2MLP")])] * 2,
        layer_list="transformer.h",
        embedding="transformer.wte",
    ),
    "llama": Expected(_config("llama", num_hidden_layers=2), "LlamaForCausalLM", _alike("Llama")),
    "bloom": Expected(  # the residual is an argument of both blocks; positions by ALiBi
        _config("bloom", n_layer=2),
        "BloomForCausalLM",
        [
            (
                "BloomBlock",
                [mixer("BloomAttention", "self_attention", input_argument=0), ffn("BloomMLP")],
            )
        ]
        * 2,
        documents="one_document",
        layer_list="transformer.h",
        embedding="transformer.word_embeddings",
    ),
    "falcon": Expected(  # adds the attention's output to the FFN's in place
        _config("falcon", num_hidden_layers=2),
        "FalconForCausalLM",
        [
            (
                "FalconDecoderLayer",
                [
                    mixer("FalconAttention", "self_attention", input_argument=0),
                    ffn("FalconMLP", reads=(), output_changed_in_place=True),
                ],
            )
        ]
        * 2,
        documents="mask",
        layer_list="transformer.h",
        embedding="transformer.word_embeddings",
    ),
    "opt": Expected(  # an FFN of two linear maps in the layer's own code
        _config("opt", num_hidden_layers=2),
        "OPTForCausalLM",
        [("OPTDecoderLayer", [mixer("OPTAttention"), ffn("Linear", "fc2", input_module="fc1")])]
        * 2,
        documents="mask",
        layer_list="model.decoder.layers",
        embedding="model.decoder.embed_tokens",
    ),
}
