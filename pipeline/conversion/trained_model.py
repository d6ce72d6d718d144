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
from pipeline.config import Method, ScaleMethod
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameter import full_shape_of
from pipeline.scale.plan import ExpansionPlan, plan_expansion


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint beside its base.

    Attributes:
        checkpoint, base: where the two halves lie.
        manifest: what the trainer wrote about the checkpoint.
        method: how it trained.
        plan: what was added to the base; None where the base itself trained.
    """

    checkpoint: Path
    base: BaseFolder
    manifest: Manifest
    method: Method
    plan: ExpansionPlan | None
    reader: CheckpointReader

    @property
    def spec(self) -> DecoderSpec:
        """The base's architecture."""
        return self.base.spec

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter with its whole shape. A tied output projection is not one of its own."""
        return {name: full_shape_of(parameter) for name, parameter in skeleton(self.spec, self.plan).named_parameters()}

    def read(self, name: str) -> Tensor:
        """The whole parameter: trained ones in fp32, the base's in the type they were published in."""
        return self.reader.read(name) if name in self.trained else self.base.read(name)

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
        model = skeleton(self.spec, self.plan).to_empty(device="cpu")
        if self.spec.tie_word_embeddings:
            model.output.base = model.embedding.base.weight
        for name, parameter in model.named_parameters():
            parameter.copy_(self.read(name))
        return model.eval()


def skeleton(spec: DecoderSpec, plan: ExpansionPlan | None) -> Decoder:
    """The decoder without values: it gives names, shapes and partitions."""
    with torch.device("meta"):
        return Decoder(spec, plan)


def open_trained(checkpoint: Path, base_path: Path) -> TrainedModel:
    """Opens a checkpoint folder beside the base that it was trained on.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit the base's architecture.
        BaseModelError: the base is missing, damaged, or another one than the checkpoint's.
    """
    manifest = load_manifest(checkpoint)
    base = open_base(base_path)
    method = _method(manifest, checkpoint)
    if base.hashes() != manifest.run.base.hashes:
        raise BaseModelError(
            f"{base_path}: other weights than the base that {checkpoint} was trained on "
            f"({manifest.run.base.path}); give that model's folder"
        )
    plan = plan_expansion(method, base.spec.widths, base.spec.num_layers) if isinstance(method, ScaleMethod) else None
    reader = CheckpointReader(checkpoint, skeleton(base.spec, plan))
    model = TrainedModel(checkpoint, base, manifest, method, plan, reader)
    _check_whole(model)
    return model


def _check_whole(model: TrainedModel) -> None:
    """Everything that the base does not hold must have been trained."""
    from_base = {name for name in model.shapes if ".base." in name or name == "output.base"}
    missing = sorted(set(model.shapes) - model.trained - (from_base if model.plan else set()))
    if missing:
        raise CheckpointError(
            f"{model.checkpoint}: lacks {missing[0]} and {len(missing) - 1} more that its manifest's method has; "
            "use another checkpoint"
        )


def _method(manifest: Manifest, checkpoint: Path) -> Method:
    try:
        method: Method = TypeAdapter(Method).validate_python(manifest.run.method)
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint / NAME}: run.method is none that this version knows "
            f"({error.errors()[0]['msg']}); convert it with the version that wrote it"
        ) from None
    return method
