"""SCALE: the base is frozen and widened; only the expansion trains.

What SCALE shares with other methods whose initial values are in a folder is here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from pipeline.config.method import (
    Initialisers,
    Lora,
    OpenRows,
    ScaleMethod,
    starts_from_expansion,
)
from pipeline.config.run import RunConfig
from pipeline.errors import BaseModelError, CheckpointError, ConfigError
from pipeline.expansion_folder import MANIFEST, ExpansionFolder, open_expansion, write_expansion
from pipeline.log import counted, get_logger
from pipeline.methods.method import TrainingMethod
from pipeline.model.architecture import architecture_of, changed_entry
from pipeline.model.base_folder import BaseFolder
from pipeline.model.bases import build_decoder, kind_of, load_base
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import is_base
from pipeline.model.new_tokens import NewTokens, holds_new_tokens
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.layers import LowRankAdapter
from pipeline.parallel.parameters import fill, full_shape_of, partition_of
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import check_tensor_parallel, plan_expansion

_logger = get_logger(__name__)


class FrozenBaseMethod(TrainingMethod):
    """A method that adds trained weights to a frozen base, by its plan (`plan_expansion`).

    Where its initial values, or the ids that have rows of their own, are in a folder, that is
    `expansion_folder`.
    """

    def __init__(
        self,
        settings: ScaleMethod | Lora,
        expansion_folder: Path,
        seed: int,
        own_tokens: tuple[int, ...] | None = None,
    ) -> None:
        self.settings = settings
        self.expansion_folder = expansion_folder
        self.seed = seed
        self._own_tokens = own_tokens

    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> CausalDecoder:
        kind_of(spec).check_method(self.settings, spec)
        plan = plan_expansion(
            self.settings, spec.widths, spec.num_layers, self.own_tokens(spec.vocab_size)
        )
        check_tensor_parallel(plan, tp.size)
        model = build_decoder(spec, plan, tp)
        check_rank(model, self.settings)
        # Only what the method adds trains; the base stays frozen.
        for name, parameter in model.named_parameters():
            # No gradient masks: a frozen block is a parameter of its own, for which autograd
            # computes no gradient, and the optimizer has no state
            # (docs/adr/0001-two-streams-not-one-padded-matrix.md).
            parameter.requires_grad_(not is_base(name))
        return model

    def own_tokens(self, vocab_size: int) -> tuple[int, ...] | None:
        """The ids that have rows of their own; all, as an upper bound, until they were counted."""
        if self.settings.open_rows is None:
            return None
        counted = self._counted_tokens()
        if counted is not None:
            return counted
        return tuple(range(vocab_size))

    @property
    def parameter_bound(self) -> str | None:
        if isinstance(self.settings.open_rows, OpenRows) and self._counted_tokens() is None:
            # `own_tokens` is a bound.
            return (
                "an upper bound, with open rows of all tokens: scale-cpt upscale counts which "
                "tokens get one (method.open_rows.min_count)"
            )
        return None

    def dry_run_rows(self, spec: DecoderSpec) -> Iterator[tuple[str, str]]:
        """The modules that have weights which only open tokens read, where the base's kind names
        them; of a native mixture, those that have no low-rank differences."""
        own = plan_expansion(self.settings, spec.widths, spec.num_layers).own
        if own is None:
            return
        if own.gains or own.low_rank is not None:
            modules = spec.describe_own(own)
            if modules is not None:
                yield "open weights", modules
        if own.low_rank is not None and spec.mixture is not None:
            yield (
                "open weights",
                "low-rank differences of all linear maps but the experts', which stay the base's",
            )

    def _counted_tokens(self) -> tuple[int, ...] | None:
        """The ids that the initial expansion has rows for; None until it is made."""
        if self._own_tokens is None and (self.expansion_folder / MANIFEST).exists():
            self._own_tokens = open_expansion(self.expansion_folder).manifest.own_tokens
        return self._own_tokens

    @cached_property
    def expansion(self) -> ExpansionFolder | None:
        if not starts_from_expansion(self.settings):
            return None
        return open_expansion(self.expansion_folder)

    def _load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        expansion = self.expansion
        assert expansion is not None, "methods without a folder load in another way"
        _check_origin(expansion, base, self.settings, self.seed)
        _check_new_tokens(expansion, base.new_tokens)
        load_base(model, base, tp)
        for name, parameter in model.named_parameters():
            if is_base(name) or holds_new_tokens(name):
                continue
            shape = full_shape_of(parameter)
            partition = partition_of(parameter)
            # Read from the folder, not computed: an SVD takes minutes, and its last bits depend on
            # the machine, so ranks that each computed one could differ.
            read = partial(expansion.read, name, shape, partition, tp.rank, tp.size)
            fill(parameter, tp, read)


def check_rank(model: CausalDecoder, settings: ScaleMethod | Lora) -> None:
    """Checks that low-rank differences have no rank above that of their linear maps.

    Raises:
        ConfigError: one has: it would hold more numbers than the map, and learn no more.
    """
    sides: dict[str, int] = {}
    rank = 0
    for path, module in model.named_modules():
        if isinstance(module, LowRankAdapter):
            rank, size_in = full_shape_of(module.a)
            size_out, _ = full_shape_of(module.b)
            sides[path.removesuffix(".adapter")] = min(size_in, size_out)
    if not sides:
        return
    narrowest = min(sides, key=sides.__getitem__)
    if not model.spec.is_native:
        # transformers' own maps may have a single channel, such as the weight of a shared expert.
        narrowest = max(sides, key=sides.__getitem__)
    if rank > sides[narrowest]:
        setting = "method.rank" if isinstance(settings, Lora) else "method.low_rank"
        raise ConfigError(
            f"{setting}: expected at most {sides[narrowest]}, the narrower side of the base's map "
            f"{narrowest}, found {rank}"
        )


class Scale(FrozenBaseMethod):
    """Preserve, Adapt or Route, with the initial expansion read from `expansion_folder`."""


def _check_origin(
    expansion: ExpansionFolder, base: BaseFolder, settings: ScaleMethod | Lora, seed: int
) -> None:
    """Raises as `check_origin`, and BaseModelError if the base's config.json has changed since."""
    expansion.check_origin(base.hashes, settings.initial_expansion_settings, seed)
    recorded = expansion.manifest.base_architecture
    if recorded is None:
        _logger.info(
            "%s: an earlier version made it without a record of its base's config.json",
            expansion.path,
        )
    changed = changed_entry(recorded, architecture_of(base.spec))
    if changed is not None:
        raise BaseModelError(
            f"{expansion.path}: the config.json of its base {expansion.manifest.base} had another "
            f"{changed}; put it back as it was, or remove this folder to make it again"
        )


def _check_new_tokens(expansion: ExpansionFolder, new_tokens: NewTokens | None) -> None:
    """Raises CheckpointError where an expansion holds rows of tokens that the run does not have."""
    if not any(holds_new_tokens(name) for name in expansion.names):
        return
    if new_tokens is None or new_tokens.tokenizer != expansion.manifest.tokenizer:
        article = "an" if new_tokens is None else "another"
        raise CheckpointError(
            f"{expansion.path}: holds rows of {article} extended vocabulary; set `vocabulary` to "
            "that of the run that it comes from"
        )


def check_named_expansion(folder: Path | None) -> None:
    """Checks that `folder` has the expansion from which a run is to continue.

    A new expansion in its place would not be trained.

    Raises:
        ConfigError: there is none.
    """
    if folder is not None and not (folder / MANIFEST).exists():
        raise ConfigError(
            f"init_expansion: {folder}: holds no expansion; convert the run to train on with "
            f"--format expansion --output {folder}, or remove the setting to begin with a new "
            "expansion"
        )


def made_expansion(config: RunConfig, base: BaseFolder) -> ExpansionFolder | None:
    """The initial expansion of a run; None if it has none, or it is yet to be made.

    Raises:
        UserError: if it is damaged, of another base or other settings, or missing where a run is to
            continue from it.
    """
    check_named_expansion(config.init_expansion)
    if (
        not starts_from_expansion(config.method)
        or not (config.initial_expansion_folder / MANIFEST).exists()
    ):
        return None
    expansion = open_expansion(config.initial_expansion_folder)
    _check_origin(expansion, base, config.method, config.seed)
    if base.new_tokens is not None or config.vocabulary is None:
        _check_new_tokens(expansion, base.new_tokens)
    return expansion


def upscale(
    settings: ScaleMethod | Lora,
    base: BaseFolder,
    output: Path,
    seed: int,
    own_tokens: tuple[int, ...] | None = None,
) -> None:
    """Computes the initial values of what is added to `base`, and writes them to the folder
    `output`.

    `own_tokens` are the ids that get rows of their own, where the method has such rows.
    """
    kind = kind_of(base.spec)
    kind.check_method(settings, base.spec)
    plan = plan_expansion(settings, base.spec.widths, base.spec.num_layers, own_tokens)
    if plan.own is not None and plan.own.low_rank is not None and base.spec.mixture is not None:
        _logger.info(
            "low-rank differences: of all linear maps but the experts', which are in one tensor"
        )
    # Names and shapes alone.
    with torch.device("meta"):
        model = build_decoder(base.spec, plan)
    check_rank(model, settings)
    names = {name for name, _ in model.named_parameters() if not is_base(name)}
    # LoRA has no block that an initialiser of the paper applies to.
    initialisers = settings.initialisers if isinstance(settings, ScaleMethod) else Initialisers()
    # It checks the base's weights, before they are hashed.
    blocks = kind.initial_expansion(model, base, names, initialisers, seed)
    origin: dict[str, Any] = {
        "base": str(base.path),
        "base_hashes": base.hashes,
        "base_architecture": architecture_of(base.spec),
        "method": settings.initial_expansion_settings,
        "expansion": None if plan.expansion is None else asdict(plan.expansion),
        "seed": seed,
    }
    if own_tokens is not None:
        origin["own_tokens"] = list(own_tokens)
    write_expansion(output, counted(blocks, "upscaling", len(names), " blocks"), origin)
