"""The model in vLLM: the layers of `remote_code`, whose attention vLLM computes over its own paged
cache.

One rank and one stage; no quantisation, LoRA or speculative decoding. Layers that run on two paths
have two sets of heads in the cache: those of a routed model from `l_fp` on, and those below a gate
that reads above the first layer with open weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from scale_cpt_serving.remote_code.configuration_scale import ScaleConfig
from scale_cpt_serving.remote_code.modeling_scale import ScaleForCausalLM
from scale_cpt_serving.remote_code.scale_streams import StreamPath

_ATTENTION = "scale_vllm"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """query [1, H, N, K], key and value [1, H_kv, N, K] of all requests' new tokens -> [1, N, H,
    K].
    """
    attended = module.served(_flat(query), _flat(key), _flat(value))
    return attended.view(1, -1, query.shape[1], query.shape[3]), None


def _flat(heads: Tensor) -> Tensor:
    """[1, H, N, K] -> [N, H K]."""
    return heads[0].transpose(0, 1).flatten(1)


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attend)


def unsupported_reason(config: ScaleConfig, ranks: int, quantized: bool) -> str | None:
    """Why a model cannot be served so; None if it can."""
    if ranks > 1:
        return "it runs on one rank: leave --tensor-parallel-size and --pipeline-parallel-size out"
    if quantized:
        return "it is served in the type of its weights: leave --quantization out"
    if config.mixture is not None:
        return "its mixture of experts has not been tried under vLLM; serve it with transformers"
    if config.runs_twice_below_gate and config.expansion_num_attention_heads:
        # vLLM gives all layers pages of one size: a layer with more heads must have a multiple of
        # the others' heads, as where a layer has them twice.
        return (
            "the layers below its gate run twice, with other numbers of heads than the layers "
            "above, which vLLM's cache does not hold; serve it with transformers, or fit the gate "
            "again at the first layer with trained weights (gate.layer), if that is above 0"
        )
    return config.packing_unsupported_reason()


def runs_on_two_paths(config: ScaleConfig, layer: int) -> bool:
    """Whether a layer computes the heads of two paths, each with as many."""
    if config.routed:
        return layer >= config.l_fp
    if config.runs_twice_below_gate:
        assert config.gate_layer is not None, "there is a gate above"
        return config.first_changed_layer <= layer < config.gate_layer
    return False


class ScaleForVllm(nn.Module):
    """A causal language model by vLLM's interface.

    Its hidden states [N, paths (D + U) + 1] are the streams of one path or of two, and a last
    column that is 1 for tokens that the gate has closed and else 0.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: ScaleConfig = vllm_config.model_config.hf_config
        reason = unsupported_reason(
            config, vllm_config.parallel_config.world_size, vllm_config.quant_config is not None
        )
        if reason is not None:
            raise ValueError(f"{vllm_config.model_config.model}: {reason}")
        config._attn_implementation = _ATTENTION
        self.model = ScaleForCausalLM(config)
        self.widths = [config.hidden_size, config.expansion_hidden_size]
        for index, layer in enumerate(self.model.layers):
            name = f"layers.{index}.attention"
            if prefix:
                name = f"{prefix}.{name}"
            paths = 2 if runs_on_two_paths(config, index) else 1
            layer.attention.served = Attention(
                num_heads=paths * config.num_attention_heads,
                head_size=config.head_dim,
                scale=layer.attention.scaling,
                num_kv_heads=paths * config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                logits_soft_cap=config.attention_softcap,
                per_layer_sliding_window=layer.attention.sliding_window,
                prefix=name,
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[N] -> [N, D + U]."""
        return self.model.embedding(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The hidden states of all requests' new tokens [N].

        Raises:
            ValueError: the model reads ids too, and there are embeddings alone.
        """
        reason = self.model.needs_ids_reason()
        if input_ids is None and reason is not None:
            raise ValueError(f"prompt embeddings: {reason}, which they do not name; give token ids")
        embedded = inputs_embeds
        if embedded is None:
            embedded = self.embed_input_ids(input_ids)
        # Masks are vLLM's. A dict keeps the model from making its own.
        no_masks = dict.fromkeys(self.model.config.layer_types)
        tokens: Tensor | None = None
        if input_ids is not None:
            tokens = input_ids.unsqueeze(0)
        last = self.model.streams(
            embedded.unsqueeze(0),
            attention_mask=no_masks,
            position_ids=positions.unsqueeze(0),
            tokens=tokens,
        )
        columns = []
        for path in last.paths:
            columns.append(path.x)
            if path.x_up is not None:  # a model trained by LoRA has none
                columns.append(path.x_up)
        if last.closed is None:
            columns.append(embedded.new_zeros(1, len(embedded), 1))
        else:
            columns.append(last.closed.to(embedded.dtype))
        return torch.cat(columns, dim=-1)[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states of n tokens -> [n, V]."""
        states = hidden_states.unsqueeze(0)
        closed = states[..., -1:] > 0
        count = states.shape[-1] // sum(self.widths)
        streams = states[..., :-1].split(self.widths * count, dim=-1)
        paths = [StreamPath(x, x_up) for x, x_up in zip(streams[::2], streams[1::2], strict=True)]
        return self.model.output(paths, closed)[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fills the parameters, and a gate's table of ids; returns their names."""
        parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        parameters |= dict(self.model.named_buffers())
        loaded = set()
        for name, tensor in weights:
            parameter = parameters[name]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor)
            loaded.add(f"model.{name}")
        return loaded
