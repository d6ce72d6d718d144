"""A trial: the scale format's formula beside transformers' own Llama, in forward hooks.

All four blocks of every map, `norm: base`, a gate on the base's stream, open weights, and the base
alone until the gate opens, with the modules of a ScaleForCausalLM: what one runtime for all bases
would compute (docs/adr/0085-native-exports-keep-their-own-layers.md). It takes no padding, and a
cache that grows; it has no router, no gate above the first changed layer and no new tokens, and
reads all texts of a batch again where one opens.

Shapes: B batch, S sequence, D hidden, U expansion.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.open_tokens import ALL_OPEN, NONE_OPEN, OpenTokens
from pipeline.hf.remote_code.scale_math import own_row_logits, rotate

ATTENTION = "beside_llama"
COLUMNS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
}
"""Maps from the streams, by their names in the scale format."""
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
"""Norms of both streams, likewise."""


class OpenedError(Exception):
    """The gate has opened while the base ran alone."""


class Text:
    """What a text leaves behind: its tokens, the gate's decisions and its mean, and the
    expansion's heads."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None
        self.opens: Tensor | None = None
        self.keys = DynamicCache()
        self.layers: list[Any] = []
        self.has_expansion = False


class Pass:
    """The expansion's side of one forward pass of the base."""

    def __init__(self, tokens: Tensor, x_up: Tensor | None, text: Text, alone: bool) -> None:
        self.tokens = tokens
        self.x_up = x_up
        self.text = text
        self.alone = alone
        self.open_tokens = NONE_OPEN if alone else ALL_OPEN
        self.opens: Tensor | None = None
        self.normed_up: Any = None
        self.rotary: Any = None
        self.heads_up: Any = None
        self.parts: dict[str, Tensor] = {}

    def added(self, y: Tensor, maps: Any, x: Tensor, x_up: Tensor | None) -> Tensor:
        """y [B, S, O] of a map of the base, with what its adapter and W12 add for open tokens."""
        if maps.adapter is not None:
            y = self.open_tokens.add(y, maps.adapter, x)
        if x_up is not None and maps.expansion_to_base is not None:
            y = self.open_tokens.add(y, maps.expansion_to_base, x_up)
        return y


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The base's heads as SDPA gives them; the expansion's are kept for the output map."""
    heads, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    current: Pass = module.owner[0].running
    if current.x_up is not None:
        parts = []
        for name in ("query", "key", "value"):
            flat = current.parts[name].unflatten(-1, (-1, module.head_dim))
            parts.append(flat.transpose(1, 2))
        query, key, value = parts
        query, key = rotate(query, *current.rotary), rotate(key, *current.rotary)
        key, value = current.text.keys.update(key, value, module.layer_idx)
        of_expansion, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        current.heads_up = of_expansion.flatten(2)
    return heads, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


class BesideLlama(LlamaForCausalLM):  # type: ignore[misc]
    """The base of a ScaleForCausalLM by transformers, and the rest of that model in its hooks."""

    running: Any = None

    @classmethod
    def of(cls, base: LlamaForCausalLM, model: ScaleForCausalLM) -> BesideLlama:
        """The model `model` on its `base`; it shares the tensors of both."""
        made = cls(copy.deepcopy(base.config)).to(base.dtype).eval()
        made.load_state_dict(base.state_dict(), assign=True)
        made.set_attn_implementation(ATTENTION)
        made.added = model
        for index, (layer, added) in enumerate(zip(made.model.layers, model.layers, strict=True)):
            layer.self_attn.owner = (made,)
            layer.register_forward_pre_hook(partial(made.enter, index), with_kwargs=True)
            for name, path in NORMS.items():
                norm = layer.get_submodule(path)
                norm.register_forward_hook(partial(made.norm, added.get_submodule(name)))
            attention: Any = added.attention
            ffn: Any = added.ffn
            for name, path in COLUMNS.items():
                within = attention if path.startswith("self_attn") else ffn
                column = partial(made.column, name, within.get_submodule(name))
                layer.get_submodule(path).register_forward_hook(column)
            layer.self_attn.o_proj.register_forward_hook(
                partial(made.row, made.heads, attention.output)
            )
            layer.mlp.down_proj.register_forward_hook(
                partial(made.row, partial(made.inner, ffn.activation), ffn.down)
            )
        made.model.norm.register_forward_hook(partial(made.norm, model.final_norm))
        made.lm_head.register_forward_hook(made.add_logits)
        return made

    def enter(self, index: int, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before a layer: the gate decides, and open tokens get rows of their own."""
        current: Pass = self.running
        model = self.added
        if index == 0:
            current.rotary = [table.unsqueeze(1) for table in kwargs["position_embeddings"]]
        if index == model.gate_layer:
            self.decide(args[0])
        if index != model.own_first_layer or current.open_tokens.none:
            return None
        x = current.open_tokens.add(args[0], model.own_input, current.tokens)
        return (x, *args[1:]), kwargs

    def decide(self, x: Tensor) -> None:
        """Lets the gate decide by the base's stream, unless it has.

        Raises OpenedError: it opens, and the base runs alone.
        """
        current: Pass = self.running
        if current.opens is None:
            by_id = self.added.token_gate.opens_id(current.tokens)
            current.opens = self.added.token_gate.decide(x, None, None, current.text.layers, by_id)
        opened = int(current.opens.count_nonzero())
        if not current.alone and opened == current.opens.numel():
            current.open_tokens = ALL_OPEN
        elif not current.alone and opened:
            current.open_tokens = OpenTokens(closed=~current.opens)
        else:
            current.open_tokens = NONE_OPEN
        if current.alone and opened:
            raise OpenedError

    def norm(self, norms: Any, _: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        """After a norm: x_up is normalised too, and open tokens get their gain."""
        current: Pass = self.running
        x = args[0]
        if current.x_up is not None:
            of_base = x if norms.shares_statistics else None
            current.normed_up = norms.expansion(current.x_up, of_base)
        if norms.own is None or current.open_tokens.none:
            return None
        own = norms.own(x, normal=norms.base.normalised(x, x))
        return current.open_tokens.choose(y, y + own)

    def column(self, name: str, maps: Any, _: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        """After a map from the streams: W12 and an adapter are added; the expansion's part is
        kept."""
        current: Pass = self.running
        if current.alone:
            return None
        y = current.added(y, maps, args[0], current.normed_up)
        if current.x_up is not None:
            of_expansion = maps.expansion_to_expansion(current.normed_up)
            current.parts[name] = maps.base_to_expansion(args[0]) + of_expansion
        return y

    def heads(self) -> Tensor:
        """What the expansion's attention has computed."""
        heads: Tensor = self.running.heads_up
        return heads

    def inner(self, activation: Any) -> Tensor:
        """The expansion's inner activations of an FFN."""
        parts = self.running.parts
        inner: Tensor = activation(parts["gate"]) * parts["up"]
        return inner

    def row(self, read: Any, maps: Any, _: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        """After a map to the streams: W12 and an adapter are added, and x_up goes on."""
        current: Pass = self.running
        if current.alone:
            return None
        up = None if current.x_up is None else read()
        y = current.added(y, maps, args[0], up)
        if up is not None:
            y_up = maps.base_to_expansion(args[0]) + maps.expansion_to_expansion(up)
            current.x_up = current.x_up + y_up
        return y

    def add_logits(self, _: nn.Module, args: Any, logits: Tensor) -> Tensor:
        """After the output map: what the expansion and own rows add for open tokens."""
        current: Pass = self.running
        model = self.added
        z = logits.float()
        kept = slice(-args[0].shape[1], None)
        open_tokens = current.open_tokens.at(kept)
        if open_tokens.none:
            return z
        added = z
        if current.x_up is not None:
            added = added + F.linear(current.normed_up[:, kept], model.output.expansion)
        if model.output.own_rows is not None:
            rows = model.output.own_rows
            added = added + own_row_logits(args[0], rows, model.output.row_of_token)
        return open_tokens.choose(z, added)

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: Any = None, **kwargs: Any
    ) -> Any:
        """As Llama's. The text is read again where the gate opens while the base runs alone."""
        model = self.added
        cache = past_key_values
        if cache is None:
            cache = DynamicCache(config=self.config)
        text: Text = getattr(cache, "text", None) or Text()
        cache.text = text
        waits = model.base_runs_alone
        if waits and text.tokens is None:
            by_id = self.added.token_gate.opens_id(input_ids)
            text.has_expansion = by_id is not None and bool(by_id.any())
        self.running = self.begin(input_ids, text, alone=waits and not text.has_expansion)
        output: Any = None
        try:
            output = super().forward(input_ids, past_key_values=cache, use_cache=True, **kwargs)
        except OpenedError:
            text.has_expansion = True
        opens = self.running.opens
        if waits:
            text.tokens = _joined(text.tokens, input_ids)
            text.opens = _joined(text.opens, opens)
        if output is not None:
            return output
        kwargs.pop("position_ids", None)
        kwargs["logits_to_keep"] = kwargs.get("logits_to_keep") or input_ids.shape[1]
        self.running = self.begin(text.tokens, text, alone=False)
        self.running.opens = text.opens
        whole = DynamicCache(config=self.config)
        output = super().forward(text.tokens, past_key_values=whole, use_cache=True, **kwargs)
        cache.layers = whole.layers
        output.past_key_values = cache
        return output

    def begin(self, tokens: Any, text: Text, *, alone: bool) -> Pass:
        """A pass over `tokens` [B, S]."""
        model = self.added
        start = None
        if model.embedding.expansion is not None and not alone:
            start = model.embedding.expansion(tokens)
        return Pass(tokens, start, text, alone)


def _joined(before: Tensor | None, new: Any) -> Tensor:
    """Two parts of a text one after the other."""
    joined: Tensor = new if before is None else torch.cat([before, new], dim=1)
    return joined
