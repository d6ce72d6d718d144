"""What a run knows of a hosted base before any weight is read.

A `HostedSpec` is a `DecoderSpec` whose features describe the *added* blocks: their heads, rotary
embedding, norms and activation. How the base itself computes is transformers' affair; the spec has
its config.json, from which transformers builds it, and its structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.base import BaseCode
from pipeline.extensions.hosted.structure import DocumentSeparation, HostedStructure
from pipeline.model.spec import DecoderSpec
from pipeline.open_weights import OpenWeights

_DOCUMENTS: dict[DocumentSeparation, str] = {
    "positions": "documents of a row are kept apart by positions",
    "four_positions": "documents of a row are kept apart by four rows of positions",
    "mask": "documents of a row are kept apart by a mask",
    "layer_masks": "documents of a row are kept apart by a mask for each type of layer",
    "one_document": "nothing keeps documents of a row apart: each gets a row of its own, padded to "
    "the longest of its micro-batch",
}


@dataclass(frozen=True)
class LogitScale:
    """What a base does to the products of its output map before they are logits.

    They are multiplied by `factor`, or with `divides` divided by it. Some bases do one and some the
    other, and the results differ in the last bit.
    """

    factor: float = 1.0
    divides: bool = False


@dataclass(frozen=True, kw_only=True)
class HostedSpec(DecoderSpec):
    """A base that transformers computes, and what is added beside its blocks.

    Attributes:
        config: the contents of config.json, without the entries that change no result.
        structure: which modules are mixers and which FFNs.
        body: the module of the base whose `last_hidden_state` the output map reads.
        logit_scale: see `LogitScale`; soft-capping is `output_softcap`.
        output_map_bias: whether the output map has a bias.
        independent_context: up to which length documents of a micro-batch leave each other alone;
            None: at any length.
        kernels_unsupported_reason: why the base needs masks of all pairs of tokens on a GPU, where
            the kernels of native bases need none (`base_attention`); None: it needs none.
    """

    config: Mapping[str, Any] = field(hash=False)
    structure: HostedStructure
    body: str
    logit_scale: LogitScale = LogitScale()
    output_map_bias: bool = False
    independent_context: int | None = None
    kernels_unsupported_reason: str | None = None

    @property
    def longest_document(self) -> int:
        if self.independent_context is None:
            return self.max_position_embeddings
        return min(self.independent_context, self.max_position_embeddings)

    @property
    def base_code(self) -> BaseCode:
        return "transformers"

    @property
    def noun(self) -> str:
        return "a hosted base"

    @property
    def has_one_stream(self) -> bool:
        return self.structure.has_one_stream

    @property
    def library_attention(self) -> str:
        if self.kernels_unsupported_reason is None:
            return "transformers computes the base and calls torch's kernels, without masks"
        attention = "transformers computes the base's attention"
        if self.structure.documents == "one_document":
            return attention
        return f"{attention}, with masks of all pairs of tokens: {self.kernels_unsupported_reason}"

    @property
    def quantization(self) -> str | None:
        """What the folder's weights are stored in, where they are dequantized when loaded."""
        quantization = self.config.get("quantization_config")
        if not quantization:
            return None
        return str(quantization["quant_method"]).upper()

    def describe(self) -> str:
        """The structure in one line, each kind of layer once."""
        counts: dict[str, int] = {}
        for layer in self.structure.layers:
            parts = [f"{block.name} ({block.kind})" for block in layer.blocks]
            kind = " + ".join(parts)
            counts[kind] = counts.get(kind, 0) + 1
        kinds: list[str] = []
        for kind, count in counts.items():
            kinds.append(f"{count} {'layer' if count == 1 else 'layers'} of {kind}")
        apart = _DOCUMENTS[self.structure.documents]
        stored = ""
        if self.quantization is not None:
            stored = f"; {self.quantization} weights, dequantized when they are loaded"
        return (
            f"hosted: {self.structure.model_class} of transformers, {'; '.join(kinds)}; {apart}"
            f"{stored}"
        )

    def describe_own(self, own: OpenWeights) -> str:
        """The modules that have open weights, those of each kind of layer once."""
        counts: dict[str, int] = {}
        for layer in self.structure.layers[own.first_layer :]:
            names: list[str] = []
            if own.low_rank is not None:
                names += layer.linear_maps
            if own.gains:
                names += layer.norms
            kind = ", ".join(names) or "nothing"
            counts[kind] = counts.get(kind, 0) + 1
        kinds: list[str] = []
        for kind, count in counts.items():
            noun = "layer" if count == 1 else "layers"
            kinds.append(f"in {count} {noun} {kind}")
        return f"{'; '.join(kinds)}; none of experts and routers"

    def to_record(self) -> dict[str, Any]:
        values = super().to_record()
        # Which kernels there are is the library's affair, and may change with its release.
        del values["kernels_unsupported_reason"]
        values["structure"] = self.structure.to_json()
        return values
