"""The model that a checkpoint and its base make together, read one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from pipeline import log
from pipeline.checkpoint.manifest import MANIFEST_FILE, CheckpointManifest, load_manifest
from pipeline.checkpoint.rank_files import CheckpointReader, read_index
from pipeline.config.method import Method
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.gating.gate import FittedGate
from pipeline.methods.method import TrainingMethod
from pipeline.methods.registry import method_for
from pipeline.model.architecture import architecture_of, changed_entry
from pipeline.model.base_folder import BaseFolder
from pipeline.model.bases import load_base, open_base
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.new_tokens import NEW_EMBEDDING, NEW_OUTPUT
from pipeline.model.open_weights import OWN_INPUT, OWN_OUTPUT, OwnRowOfToken
from pipeline.model.spec import DecoderSpec
from pipeline.model.streaming import stream_weights
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.parameters import default_dtype, full_shape_of, named_trained_parameters
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale.widened_norm import WidenedNorm

_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint and its base.

    Attributes:
        settings: the section `method` that it was trained with.
        method: the method that these settings describe.
        structure: the decoder on the meta device: names and shapes. The rows of an extended
            vocabulary follow those of the base, in one matrix. It is a model with a larger
            vocabulary, and an output that is not tied.
        stored: the decoder on the meta device as it was trained, and as the checkpoint holds it.
        gate: the gate that was fitted for it, if it is to have one.
        stored_scale: the scale of added channels in a merged export, if the norms are to count them
            as there.
        untrained: whether every parameter is read from the base: with a method that adds nothing,
            the model is then the base itself.
    """

    checkpoint: Path
    base: BaseFolder
    manifest: CheckpointManifest
    settings: Method
    method: TrainingMethod
    structure: CausalDecoder
    stored: CausalDecoder
    reader: CheckpointReader
    gate: FittedGate | None = None
    stored_scale: float | None = None
    untrained: bool = False

    @property
    def spec(self) -> DecoderSpec:
        """The model's architecture: the base's, with the layers that were added to it."""
        return self.structure.spec

    @property
    def plan(self) -> ExpansionPlan | None:
        """How the base was widened; None if it was not."""
        return self.structure.plan

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer: the base's, or the extended one."""
        vocabulary = self.manifest.run.vocabulary
        if vocabulary is None:
            return self.base.path
        return Path(vocabulary)

    def with_tokenizer(self, vocabulary: Path) -> TrainedModel:
        """The same with the extended tokenizer in the folder `vocabulary`."""
        run = self.manifest.run.model_copy(update={"vocabulary": str(vocabulary)})
        return replace(self, manifest=self.manifest.model_copy(update={"run": run}))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's whole shape. A tied output projection is not a parameter of its own."""
        return {
            name: full_shape_of(parameter) for name, parameter in self.structure.named_parameters()
        }

    @cached_property
    def adapters(self) -> dict[str, LowRankAdapter]:
        """The low-rank adapters, without values, by their path."""
        modules = self.structure.named_modules()
        return {path: module for path, module in modules if isinstance(module, LowRankAdapter)}

    @property
    def own_row_of(self) -> OwnRowOfToken | None:
        """Which open row each token has; None for a model without open rows."""
        own_input = self.structure.own_input
        return None if own_input is None else own_input.row_of

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that the checkpoint holds."""
        return frozenset(self.reader.names)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """How many parameters trained, and how many there are."""
        trained = 0
        total = 0
        for name, parameter in self.stored.named_parameters():
            size = prod(full_shape_of(parameter))
            total += size
            if name in self.trained:
                trained += size
        return trained, total

    def read(self, name: str) -> Tensor:
        """A whole parameter of `structure`.

        Trained ones are in fp32. The base's are as published, also where it trained in 8 or 4 bits.
        """
        if name in (OWN_INPUT, OWN_OUTPUT) and self.manifest.run.new_rows:
            # The row of new tokens, which have no difference from a row of the base.
            return F.pad(self.read_stored(name), (0, 0, 0, 1))
        module, _, _ = name.partition(".")
        new_rows = {"embedding": NEW_EMBEDDING, "output": NEW_OUTPUT}.get(module)
        if new_rows is None or not self.manifest.run.new_rows:
            return self.read_stored(name)
        # The rows of the new tokens are a matrix of their own: the columns of the base's hidden
        # size first, then those of the expansion.
        base_name = name
        if name == "output.base" and self.base.spec.tie_word_embeddings:
            base_name = "embedding.base.weight"
        width = self.base.spec.widths.hidden_size
        columns = slice(width)
        if "expansion" in name:
            columns = slice(width, None)
        # In fp32, as the new rows trained: the base's 16-bit rows lose nothing by it.
        old = self.read_stored(base_name).float()
        new = self.read_stored(new_rows)[:, columns]
        return torch.cat([old, new])

    def read_stored(self, name: str) -> Tensor:
        """A whole parameter of `stored`; see `read`."""
        if name in self.trained and not self.untrained:
            return self.reader.read(name)
        return self.base.read(self.method.base_name(name, self.base.spec))

    @torch.no_grad()
    def logits(self, windows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The logits of each window of tokens, with one layer in memory at a time, or of a base
        that is read whole, all.

        Args:
            windows: tensors [S]. All of them pass a layer together.
            dtype: the dtype of the computation.

        Returns:
            A tensor [S, V] in fp32 for each window.
        """
        if self.base.is_read_whole:
            decoder = self.loaded(dtype, torch.device("cpu"))
        else:
            decoder, fill_output = self.streamed(dtype)
        # Padding follows the text, and attention is causal: it changes no logit of a window.
        tokens = nn.utils.rnn.pad_sequence(list(windows), batch_first=True)
        length = tokens.shape[1]
        hidden = decoder.hidden_states(tokens)
        if not self.base.is_read_whole:
            fill_output()
        logits = []
        for number, window in enumerate(windows):
            # The hidden states are those of all windows in a row, [B * S, D], with their padding.
            rows = slice(number * length, number * length + len(window))
            logits.append(decoder.output.logits(hidden.rows(rows)))
        return logits

    def streamed(self, dtype: torch.dtype) -> tuple[CausalDecoder, Callable[[], None]]:
        """The decoder in `dtype`, of which at most one module has values at a time.

        It has its gate, if there is one. `OutputProjection.logits` is no forward pass of a module:
        the function that comes with the decoder reads the weights of the output projection, to
        keep.
        """
        decoder = self._without_values(dtype)
        assert isinstance(decoder, Decoder), "other bases are loaded whole"
        return decoder, stream_weights(decoder, self.read, dtype)

    def loaded(self, dtype: torch.dtype, device: torch.device) -> CausalDecoder:
        """The decoder in `dtype`, whole on `device`, with its gate if it has one."""
        if self.base.is_read_whole:
            return self._loaded_whole(dtype, device)
        decoder = self._without_values(dtype)
        values = {name: self.read(name).to(device, dtype) for name, _ in decoder.named_parameters()}
        decoder.load_state_dict(values, strict=False, assign=True)
        # `assign` has replaced the embedding's parameter, so that the output's is no longer the
        # same.
        if isinstance(decoder, Decoder) and decoder.spec.tie_word_embeddings:
            decoder.output.base = decoder.embedding.base.weight
        return decoder

    @torch.no_grad()
    def _loaded_whole(self, dtype: torch.dtype, device: torch.device) -> CausalDecoder:
        """`loaded` with a base that is read whole."""
        with default_dtype(dtype):
            decoder = self.method.build(self.base.spec, SINGLE, "none")
        load_base(decoder, self.base)
        for name, parameter in named_trained_parameters(decoder):
            parameter.copy_(self.reader.read(name))
        decoder.gate = self.gate
        return decoder.to(device).eval()

    def _without_values(self, dtype: torch.dtype) -> CausalDecoder:
        spec = _whole_vocabulary(self.base.spec, self.manifest)
        with torch.device("meta"):
            decoder = self.method.build(spec, SINGLE, "none")
        decoder = decoder.to(dtype).eval()
        decoder.output.base_columns = self.base.spec.vocab_size
        decoder.gate = self.gate
        if self.stored_scale is not None:
            for module in decoder.modules():
                if isinstance(module, WidenedNorm):
                    module.as_stored(self.stored_scale)
        return decoder


def open_trained(checkpoint: Path, base_path: Path) -> TrainedModel:
    """Opens a checkpoint folder and the base that it was trained on.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit the architecture of the
            base.
        BaseModelError: the base is missing, damaged, or another one than the checkpoint's.
    """
    manifest = load_manifest(checkpoint)
    base = open_base(base_path, "transformers" if manifest.run.is_hosted else "native")
    try:
        settings: Method = TypeAdapter(Method).validate_python(manifest.run.method)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint / MANIFEST_FILE}: run.method is unknown to this version "
            f"({error.errors()[0]['msg']}); convert it with the version that wrote it"
        ) from None
    if base.hashes != manifest.run.base.hashes:
        raise BaseModelError(
            f"{base_path}: other weights than the base that {checkpoint} was trained on "
            f"({manifest.run.base.path}); give that model's folder"
        )
    if manifest.run.base.architecture is None:
        _logger.info(
            "%s: an earlier version wrote it without a record of its base's config.json", checkpoint
        )
    changed = changed_entry(manifest.run.base.architecture, architecture_of(base.spec))
    if changed:
        raise BaseModelError(
            f"{base_path}: its config.json has another {changed} than when {checkpoint} was "
            "trained; put it back as it was"
        )
    # No folder of initial values is needed: only the structure is used, the values are in the
    # checkpoint.
    method = method_for(settings, Path(), manifest.run.seed, manifest.run.own_tokens)
    with torch.device("meta"):
        # At one rank: partitions are kept as attributes, from which the reader knows how the shards
        # of any layout join.
        structure = method.build(_whole_vocabulary(base.spec, manifest), SINGLE, "none")
        stored = method.build(replace(base.spec, new_tokens=manifest.run.new_rows), SINGLE, "none")
    reader = CheckpointReader(read_index(checkpoint), stored)
    trained = {name for name, _ in named_trained_parameters(stored)}
    missing = sorted(trained - set(reader.names))
    if missing:
        raise CheckpointError(
            f"{checkpoint}: lacks {missing[0]} and {len(missing) - 1} more that its manifest's "
            "method has; use another checkpoint"
        )
    return TrainedModel(checkpoint, base, manifest, settings, method, structure, stored, reader)


def describe_checkpoint(checkpoint: Path, base: Path | None = None) -> dict[str, Any]:
    """The facts about a checkpoint; `base` is the path of its base, if that has moved.

    Raises:
        CheckpointError, BaseModelError: what is read is missing, damaged or does not fit together.
    """
    manifest = load_manifest(checkpoint)
    model = open_trained(checkpoint, base or Path(manifest.run.base.path))
    trained, total = model.counts
    return {
        "run": manifest.run.name,
        "base": manifest.run.base.path,
        "method": manifest.run.method,
        "expansion": manifest.run.expansion,
        **manifest.position.model_dump(mode="json", exclude={"recent"}),
        "layout": manifest.layout.model_dump(),
        "trainable_parameters": trained,
        "total_parameters": total,
        "trained_fraction": trained / total,
    }


def _whole_vocabulary(spec: DecoderSpec, manifest: CheckpointManifest) -> DecoderSpec:
    """The base's architecture with the new rows of a run as part of its vocabulary."""
    new_tokens = manifest.run.new_rows
    if not new_tokens:
        return spec
    # In training a tied base has two matrices of new rows, because their expansion columns differ.
    return replace(
        spec,
        vocab_size=spec.vocab_size + new_tokens,
        added_tokens=new_tokens,
        tie_word_embeddings=False,
    )
