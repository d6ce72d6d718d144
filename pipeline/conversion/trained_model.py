"""The model that a checkpoint and its base make together, readable one parameter at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from pipeline.checkpoint.manifest import NAME, Manifest, load_manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.method import Method
from pipeline.errors import BaseModelError, CheckpointError
from pipeline.methods import method_for
from pipeline.methods.method import TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import is_base, open_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.sharding import full_shape_of, named_trained_parameters
from pipeline.parallel.topology import SINGLE
from pipeline.scale.layers import block_kind
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


# --- The training model computing logits while only one of its layers is in memory ----------------------------------


class StreamedDecoder:
    """A decoder of any size in `dtype`: each module gets its weights when its turn comes, and loses them after it."""

    def __init__(self, model: TrainedModel, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self.decoder = skeleton(model.method, model.base).to(dtype).eval()
        for name, module in self._units():
            module.register_forward_pre_hook(self._filler(name))
            module.register_forward_hook(_empty)

    def _units(self) -> Iterator[tuple[str, nn.Module]]:
        """What is in memory at a time."""
        yield "embedding.", self.decoder.embedding
        yield from ((f"layers.{index}.", layer) for index, layer in enumerate(self.decoder.layers))
        yield "final_norm.", self.decoder.final_norm

    @torch.no_grad()
    def logits(self, windows: Sequence[Tensor]) -> list[Tensor]:
        """The logits [S, V] in fp32 of each window of tokens [S]. All windows pass a layer together."""
        tokens = nn.utils.rnn.pad_sequence(list(windows), batch_first=True)
        hidden = self.decoder.hidden_states(tokens)
        output = self.decoder.output
        self._fill(output, "output.")
        starts = range(0, tokens.numel(), tokens.shape[1])
        logits = [
            output.logits(hidden.rows(slice(start, start + len(window))))
            for start, window in zip(starts, windows, strict=True)
        ]
        _empty(output)
        return logits

    def _filler(self, prefix: str) -> Callable[[nn.Module, object], None]:
        return lambda module, _: self._fill(module, prefix)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        for path, owner in module.named_modules():
            for name in owner._parameters:
                full_name = prefix + ".".join(filter(None, (path, name)))
                if owner._parameters[name] is not None:
                    owner._parameters[name] = nn.Parameter(self._read(full_name), requires_grad=False)

    def _read(self, name: str) -> Tensor:
        # A tied output projection has no values of its own.
        return self.model.read(name if name in self.model.shapes else "embedding.base.weight").to(self.dtype)


def _empty(module: nn.Module, *_: object) -> None:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)


# --- What a checkpoint is, in words and figures: its run, its place in it, and how large each kind of block has grown


def describe_checkpoint(checkpoint: Path, base: Path | None = None) -> dict[str, Any]:
    """The facts about a checkpoint; `base` says where its base lies now, if not where its manifest says.

    Raises:
        CheckpointError, BaseModelError: what is read is missing, damaged or does not fit together.
    """
    manifest = load_manifest(checkpoint)
    model = open_trained(checkpoint, base or Path(manifest.run.base.path))
    trained = sum(prod(model.shapes[name]) for name in model.trained)
    total = sum(prod(shape) for shape in model.shapes.values())
    return {
        "run": manifest.run.name,
        "base": manifest.run.base.path,
        "method": manifest.run.method,
        "expansion": manifest.run.expansion,
        **manifest.position.model_dump(),
        "layout": manifest.layout.model_dump(),
        "trainable_parameters": trained,
        "total_parameters": total,
        "trained_fraction": trained / total,
        "norms": block_norms(model),
    }


def block_norms(model: TrainedModel) -> dict[str, list[float]]:
    """The Frobenius norm of each kind of block in every layer, beside the base's; a whole added layer is a kind too."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0] * model.spec.num_layers)
    for name in model.shapes:
        if not name.startswith("layers.") or name.endswith(".bias"):
            continue
        layer = int(name.split(".")[1])
        own = "added layer" if layer in model.structure.added_layers else "base"
        kind = own if is_base(name) else block_kind(name)
        if kind is not None:
            squares[kind][layer] += float(model.read(name).detach().float().square().sum())
    return {kind: [value**0.5 for value in layers] for kind, layers in squares.items()}


def as_text(facts: dict[str, Any]) -> str:
    """The facts for a person to read."""
    method = facts["method"]
    lines = [
        f"run       {facts['run']}, step {facts['step']:,}, {facts['tokens_seen']:,} tokens",
        f"base      {facts['base']}",
        f"method    {', '.join(f'{key} {value}' for key, value in method.items() if not isinstance(value, dict))}",
    ]
    if facts["expansion"]:
        lines.append(f"widths    {', '.join(f'{key} +{value}' for key, value in facts['expansion'].items())}")
    lines.append(
        f"trained   {facts['trainable_parameters']:,} of {facts['total_parameters']:,} parameters "
        f"({100 * facts['trained_fraction']:.1f} %)"
    )
    lines.append(f"layout    {', '.join(f'{key} {value}' for key, value in facts['layout'].items())}")
    kinds = list(facts["norms"])
    lines += ["", "layer  " + "  ".join(f"{kind:>22}" for kind in kinds)]
    for layer, norms in enumerate(zip(*facts["norms"].values(), strict=True)):
        lines.append(f"{layer:>5}  " + "  ".join(f"{norm:>22.4f}" for norm in norms))
    return "\n".join(lines)
