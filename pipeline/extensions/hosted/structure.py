"""The structure of a hosted base: which of its modules are token mixers and which FFNs.

A hosted base is a decoder that transformers builds. Its modules run as they are, and the expansion
stands beside each of its blocks. The package `discovery` finds the structure; it is stored with the
expansion and compared whenever the base is loaded again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from pipeline.errors import BaseModelError

HIDDEN_STATES = "hidden_states"
"""The name that transformers' modules give to their argument with the residual stream."""

BlockKind = Literal["mixer", "ffn"]
"""A mixer moves information between tokens: attention of any kind, linear attention, a state space,
a convolution. An FFN, dense or a mixture of experts, treats each token alone."""

DocumentSeparation = Literal["positions", "four_positions", "mask", "layer_masks", "one_document"]
"""How the tokens of a row are kept from attending to an earlier document of the row.

positions: `position_ids` [B, S] that restart at 0, no mask and no cache. four_positions: the same
numbers as [4, B, S] (M-RoPE: text, time, height, width). mask: an additive mask [B, 1, S, S] beside
restarting positions. layer_masks: such a mask for each type of layer, by its name, because layers
with a window need another one. one_document: nothing keeps them apart, so a row holds one document.
`pipeline.extensions.hosted.documents.document_inputs` makes these arguments.
"""


class UnsupportedStructureError(BaseModelError):
    """A model that cannot be hosted: its structure is not understood, or is not one to add to."""


@dataclass(frozen=True)
class HostedBlock:
    """A module of a decoder layer beside which a block of the expansion stands.

    Attributes:
        name: the module whose output is added to, within its layer, e.g. `self_attn`.
        module_class: that module's class.
        kind: whether it mixes tokens.
        input_module: the module whose input the added block reads, within the layer. It is `name`,
            but for an FFN that is two linear maps without a module around them.
        input_argument: which argument of `input_module` holds that input, [B, S, hidden_size] or
            [B * S, hidden_size]: an index among the positional ones, or a keyword.
        output_index: where the module's result is a tuple, the index of the tensor that is added
            to; None: the result is that tensor.
        reads: the indices of the earlier blocks of the layer on whose output the input depends. It
            is empty for an FFN parallel to the attention.
        additivity: the correlation of what is added to the block's output with what arrives in the
            layer's output: 1 for a plain residual, about 0.5 where a norm follows.
        output_changed_in_place: whether the layer later writes into the tensor of the output, so
            that whoever keeps it needs a copy.
        shares_keys: whether it attends to keys and values of another layer.
    """

    name: str
    module_class: str
    kind: BlockKind
    input_module: str
    input_argument: int | str
    output_index: int | None = None
    reads: tuple[int, ...] = ()
    additivity: float = 1.0
    output_changed_in_place: bool = False
    shares_keys: bool = False


@dataclass(frozen=True)
class HostedLayer:
    """A layer of the decoder.

    Attributes:
        index: its index in the list of layers.
        module_class: its class.
        blocks: its blocks, in the order in which they run.
        linear_maps: the maps of its blocks that can have low-rank differences for open tokens.
        norms: its norms whose gains can have differences for open tokens.
    """

    index: int
    module_class: str
    blocks: tuple[HostedBlock, ...]
    linear_maps: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostedStructure:
    """What the expansion needs to know of a hosted base. All names are those of `named_modules()`.

    Attributes:
        model_type: the base's `model_type` in config.json.
        model_class: the class of transformers that is built; for a multimodal base, the class of
            the whole model.
        hidden_size: the width of every block's input and output.
        layer_list: the module that holds the decoder's layers, e.g. `model.layers`.
        layers: the layers that run for text, in order.
        embedding: the module of the token embedding.
        output: the module that computes the logits.
        documents: how documents in one row are kept apart.
        last_norms: the norms after the last layer whose gains can have differences for open tokens.
        has_one_stream: whether layers give each other one residual stream, [B, S, hidden_size].
            Some types carry several: [n, B, S, hidden_size], [B, S, n, hidden_size].
    """

    model_type: str
    model_class: str
    hidden_size: int
    layer_list: str
    layers: tuple[HostedLayer, ...]
    embedding: str
    output: str
    documents: DocumentSeparation
    last_norms: tuple[str, ...] = ()
    has_one_stream: bool = True

    @property
    def shares_keys(self) -> bool:
        """Whether a layer attends to keys and values of another one."""
        return any(block.shares_keys for layer in self.layers for block in layer.blocks)

    def layer_name(self, layer: HostedLayer) -> str:
        """The module of `layer` in the model."""
        return f"{self.layer_list}.{layer.index}"

    def to_json(self) -> dict[str, Any]:
        """The structure as JSON, in which each kind of layer occurs once."""
        kinds: list[dict[str, Any]] = []
        indices: list[int] = []
        kind_of: list[int] = []
        for layer in self.layers:
            kind = asdict(layer)
            del kind["index"]
            if kind not in kinds:
                kinds.append(kind)
            indices.append(layer.index)
            kind_of.append(kinds.index(kind))
        values = asdict(self)
        values["layers"] = {"kinds": kinds, "indices": indices, "kind_of": kind_of}
        return values
