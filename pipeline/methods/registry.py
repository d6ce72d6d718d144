"""Which `TrainingMethod` runs the settings of a section `method`."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.method import (
    Freeze,
    FullFineTuning,
    LlamaPro,
    Lora,
    Method,
    ScaleMethod,
    offered_methods,
)
from pipeline.config.run import RunConfig
from pipeline.extension import load_class
from pipeline.methods.baselines import (
    FreezeMethod,
    FullFineTuningMethod,
    LlamaProMethod,
    LoraMethod,
)
from pipeline.methods.method import TrainingMethod
from pipeline.methods.scale import Scale


def method_for(
    settings: Method,
    expansion_folder: Path,
    seed: int,
    own_tokens: tuple[int, ...] | None = None,
) -> TrainingMethod:
    """The method of `settings`; one whose initial values are in a folder reads them from
    `expansion_folder`.

    `seed` determines random initial values. `own_tokens` are the ids that have rows of their own,
    where no expansion folder says so.
    """
    offered = offered_methods().get(settings.name)
    if offered is not None:
        made: TrainingMethod = load_class(offered.method, TrainingMethod)(settings, seed)
        return made
    match settings:
        case ScaleMethod():
            return Scale(settings, expansion_folder, seed, own_tokens)
        case FullFineTuning():
            return FullFineTuningMethod()
        case Freeze():
            return FreezeMethod(settings)
        case Lora():
            return LoraMethod(settings, expansion_folder, seed, own_tokens)
        case LlamaPro():
            return LlamaProMethod(settings)


def training_method(config: RunConfig) -> TrainingMethod:
    """The method of a run."""
    return method_for(config.method, config.initial_expansion_folder, config.seed)
