"""The blocks of the expansion that stand beside the blocks of a hosted base.

Beside a token mixer stands causal attention, whatever the mixer is; beside an FFN stands an FFN.
With x the input of the base's block and y its output, and x̂_up the normalised expansion stream:

    q, k, v = W21 x + W22 x̂_up for each        g, u = W21 x + W22 x̂_up for each
    h       = attention(q, k, v)               h    = act(g) ⊙ u

    y      += W12 h                            in collaborative layers only
    y_up    = W21 y + W22 h

It is the expansion of a mixture of experts (`pipeline.model.dense_expansion`): W21 of the output
map reads y, because what the base's block has inside is unknown.
"""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.extensions.hosted.own_weights import low_rank_differences, own_gains
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.structure import HostedBlock, HostedLayer
from pipeline.hf.remote_code.scale_own_calls import nested
from pipeline.model.decoder_layer import Context
from pipeline.model.dense_expansion import AddedColumnLinear, AddedRowLinear
from pipeline.model.spec import ACTIVATIONS
from pipeline.open_tokens import OpenTokens
from pipeline.parallel.layers import RMSNorm
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import ExpansionPlan, Module, Widths

MODULE_OF_KIND: dict[str, Module] = {"mixer": "attention", "ffn": "ffn"}
"""The name of the block beside a base's block, by the kind of the latter."""


def added_widths(plan: ExpansionPlan) -> Widths:
    """The widths of the expansion, where blocks of it are built: LoRA has none."""
    assert plan.expansion is not None, "its caller builds blocks of the expansion"
    return plan.expansion


class AddedAttention(nn.Module):
    """Causal heads beside a token mixer.

    x, y: [B, S, D], x_up: [B, S, U] -> the changed y, and y_up.
    """

    def __init__(self, spec: HostedSpec, plan: ExpansionPlan, layer: int) -> None:
        super().__init__()
        added = added_widths(plan)
        self.head_dim = spec.head_dim
        streams = (spec.widths.hidden_size, added.hidden_size)
        heads = added.num_attention_heads * spec.head_dim
        kv_heads = added.num_key_value_heads * spec.head_dim
        self.stream_norm = RMSNorm(added.hidden_size, spec.norm_eps, SINGLE)
        self.query = AddedColumnLinear(streams, heads, tp=SINGLE)
        self.key = AddedColumnLinear(streams, kv_heads, tp=SINGLE)
        self.value = AddedColumnLinear(streams, kv_heads, tp=SINGLE)
        collaborative = plan.has_expansion_to_base(layer, "attention")
        self.output = AddedRowLinear(heads, streams, collaborative=collaborative, tp=SINGLE)

    def forward(
        self, x: Tensor, x_up: Tensor, y: Tensor, context: Context, open_tokens: OpenTokens
    ) -> tuple[Tensor, Tensor]:
        x_up = self.stream_norm(x_up)
        query = self.query(x, x_up).unflatten(-1, (-1, self.head_dim))
        key = self.key(x, x_up).unflatten(-1, (-1, self.head_dim))
        value = self.value(x, x_up).unflatten(-1, (-1, self.head_dim))
        if context.rotary is not None:
            query = context.rotary.rotate(query)
            key = context.rotary.rotate(key)
        heads = context.attend(query, key, value).flatten(2)
        return _written(self.output, y, heads, open_tokens)


class AddedFeedForward(nn.Module):
    """An FFN beside an FFN of the base, dense or a mixture of experts.

    Shapes as in `AddedAttention`.
    """

    def __init__(self, spec: HostedSpec, plan: ExpansionPlan, layer: int) -> None:
        super().__init__()
        added = added_widths(plan)
        self.activation = ACTIVATIONS[spec.activation]
        streams = (spec.widths.hidden_size, added.hidden_size)
        inner = added.intermediate_size
        self.stream_norm = RMSNorm(added.hidden_size, spec.norm_eps, SINGLE)
        self.gate = AddedColumnLinear(streams, inner, tp=SINGLE)
        self.up = AddedColumnLinear(streams, inner, tp=SINGLE)
        collaborative = plan.has_expansion_to_base(layer, "ffn")
        self.down = AddedRowLinear(inner, streams, collaborative=collaborative, tp=SINGLE)

    def forward(
        self, x: Tensor, x_up: Tensor, y: Tensor, context: Context, open_tokens: OpenTokens
    ) -> tuple[Tensor, Tensor]:
        x_up = self.stream_norm(x_up)
        inner = self.activation(self.gate(x, x_up)) * self.up(x, x_up)
        return _written(self.down, y, inner, open_tokens)


def _written(
    output: AddedRowLinear, y: Tensor, inner: Tensor, open_tokens: OpenTokens
) -> tuple[Tensor, Tensor]:
    """y + W12 h, and y_up = W21 y + W22 h."""
    y, y_up = output(y, inner, open_tokens=open_tokens)
    return y, output.base_to_expansion(y) + y_up


class AddedLayer(nn.Module):
    """The added blocks of one layer, in the order of the base's blocks.

    They are called one by one from hooks of the base's modules, never together.

    Attributes:
        index: the number of the layer among those that run.
        collaborative: at or above `l_fp`, where the base stream may depend on trained parameters.
        names: the name of each block: `attention` or `ffn`, with a number from the second on;
            LoRA has no blocks.
        low_rank: the low-rank differences of linear maps of the base's layer, by their names.
        gains: the differences of the gains of its norms.
    """

    def __init__(
        self,
        spec: HostedSpec,
        plan: ExpansionPlan,
        layer: int,
        structure: HostedLayer,
        of_base: nn.Module,
    ) -> None:
        super().__init__()
        self.index = layer
        self.collaborative = layer >= plan.collaborative_from
        blocks = () if plan.expansion is None else structure.blocks
        self.names = block_names(blocks)
        for name, block in zip(self.names, blocks, strict=True):
            if block.kind == "mixer":
                self.add_module(name, AddedAttention(spec, plan, layer))
            else:
                self.add_module(name, AddedFeedForward(spec, plan, layer))
        self.low_rank = low_rank_differences(of_base, structure.linear_maps, plan.own_in(layer))
        norms = structure.norms if plan.has_own_gains(layer) else ()
        self.gains = own_gains(of_base, norms)
        # The kinds of parameter groups, as a native base has them.
        self.adapter = nested(self.low_rank)
        self.own = nested(self.gains)

    def block(self, index: int) -> nn.Module:
        """The block beside the base's block `index`."""
        return self.get_submodule(self.names[index])


def block_names(blocks: tuple[HostedBlock, ...]) -> list[str]:
    """The names of the blocks that stand beside `blocks`."""
    names: list[str] = []
    for block in blocks:
        name: str = MODULE_OF_KIND[block.kind]
        count = sum(other.partition("_")[0] == name for other in names)
        if count:
            name = f"{name}_{count + 1}"
        names.append(name)
    return names
