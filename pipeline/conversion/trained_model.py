"""The model that a checkpoint and its base make together, readable one parameter at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from pipeline.checkpoint.manifest import NAME, Manifest, load_manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.method import Method
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.methods import method_for
from pipeline.methods.method import TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.low_rank import LowRankAdapter
from pipeline.parallel.parameter import full_shape_of, named_trained_parameters
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import ExpansionPlan


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint beside its base.

    Attributes:
        checkpoint, base: where the two halves lie.
        manifest: what the trainer wrote about the checkpoint.
        settings: the section `method` that it trained with.
        method: what those settings make of the base.
        structure: the decoder without values: it gives names, shapes and partitions.
    """

    checkpoint: Path
    base: BaseFolder
    manifest: Manifest
    settings: Method
    method: TrainingMethod
    structure: Decoder
    reader: CheckpointReader

    @property
    def spec(self) -> DecoderSpec:
        """The model's architecture: the base's, with the layers that were added to it."""
        return self.structure.spec

    @property
    def plan(self) -> ExpansionPlan | None:
        """How the base was widened; None where it was not."""
        return self.structure.plan

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter with its whole shape. A tied output projection is not one of its own."""
        return {name: full_shape_of(parameter) for name, parameter in self.structure.named_parameters()}

    @cached_property
    def adapters(self) -> dict[str, LowRankAdapter]:
        """The low-rank adapters, without values, by their path."""
        return {path: one for path, one in self.structure.named_modules() if isinstance(one, LowRankAdapter)}

    def read(self, name: str) -> Tensor:
        """The whole parameter: trained ones in fp32, the base's in the type they were published in."""
        if name in self.trained:
            return self.reader.read(name)
        return self.base.read(self.method.base_name(name, self.base.spec))

    @cached_property
    def trained(self) -> frozenset[str]:
        """The parameters that the checkpoint holds."""
        return frozenset(self.reader.names)

    @cached_property
    def base_dtype(self) -> torch.dtype:
        """The type that the base was published in."""
        return self.base.read("final_norm.base.weight").dtype

    @torch.no_grad()
    def decoder(self) -> Decoder:
        """The training model itself, in fp32 on the host."""
        model = skeleton(self.method, self.base).to_empty(device="cpu")
        if self.spec.tie_word_embeddings:
            model.output.base = model.embedding.base.weight
        for name, parameter in model.named_parameters():
            parameter.copy_(self.read(name))
        return model.eval()


def skeleton(method: TrainingMethod, base: BaseFolder) -> Decoder:
    """The decoder that `method` makes of `base`, without values."""
    with torch.device("meta"):
        return method.build(base.spec, SINGLE, "none")


def open_trained(checkpoint: Path, base_path: Path) -> TrainedModel:
    """Opens a checkpoint folder beside the base that it was trained on.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit the base's architecture.
        BaseModelError: the base is missing, damaged, or another one than the checkpoint's.
    """
    manifest = load_manifest(checkpoint)
    base = open_base(base_path)
    settings = _settings(manifest, checkpoint)
    if base.hashes() != manifest.run.base.hashes:
        raise BaseModelError(
            f"{base_path}: other weights than the base that {checkpoint} was trained on "
            f"({manifest.run.base.path}); give that model's folder"
        )
    # Only its structure is asked for: the initial values, of which the folder would be read, lie in the checkpoint.
    method = method_for(settings, Path(), manifest.run.seed)
    structure = skeleton(method, base)
    model = TrainedModel(
        checkpoint, base, manifest, settings, method, structure, CheckpointReader(checkpoint, structure)
    )
    _check_whole(model)
    return model


def _check_whole(model: TrainedModel) -> None:
    """Everything that the method trains must be there."""
    wanted = {name for name, _ in named_trained_parameters(model.structure)}
    if missing := sorted(wanted - model.trained):
        raise CheckpointError(
            f"{model.checkpoint}: lacks {missing[0]} and {len(missing) - 1} more that its manifest's method has; "
            "use another checkpoint"
        )


def _settings(manifest: Manifest, checkpoint: Path) -> Method:
    try:
        settings: Method = TypeAdapter(Method).validate_python(manifest.run.method)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint / NAME}: run.method is none that this version knows "
            f"({error.errors()[0]['msg']}); convert it with the version that wrote it"
        ) from None
    return settings
