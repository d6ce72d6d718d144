"""What a checkpoint is, in words and figures: its run, its place in it, and how large each kind of block has grown."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

from pipeline.checkpoint.manifest import load_manifest
from pipeline.conversion.trained_model import TrainedModel, open_trained
from pipeline.model.from_hf import is_base
from pipeline.scale.linear import block_kind


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
