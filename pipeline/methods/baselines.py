"""The methods that SCALE is compared with: full fine-tuning, Freeze, LoRA and LLaMA Pro."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pipeline.config.method import Freeze, LlamaPro, Lora, starts_from_expansion
from pipeline.errors import ConfigError
from pipeline.methods.method import TrainingMethod
from pipeline.methods.scale import FrozenBaseMethod
from pipeline.model import bases
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import REFERENCE, Decoder
from pipeline.model.families import EXPERTS
from pipeline.model.from_hf import is_base, load_base
from pipeline.model.initial_expansion import initial_a
from pipeline.model.mixture import Mixture
from pipeline.model.new_tokens import holds_new_tokens
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import fill_whole, full_shape_of, held_values
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.widened_linear import WidenedLinear


def _freeze_routers(model: Decoder) -> None:
    """Keeps the routers of a mixture of experts as published.

    Training one takes a loss that balances the experts.
    """
    for module in model.modules():
        if isinstance(module, Mixture):
            module.router.requires_grad_(False)


class FullFineTuningMethod(TrainingMethod):
    """Every parameter of the base trains; nothing is added."""

    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> Decoder:
        if spec.mixture is not None and spec.mixture.balance_coefficient is None:
            raise ConfigError(
                f"method.name: fft would train the routers of a base of family {spec.family}, "
                "which has no loss that balances the experts; take scale, lora, llama_pro or "
                "freeze, which leave routers as they are"
            )
        return Decoder(spec, tp=tp)

    def _load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        load_base(model, base, tp, source=lambda name: name.removeprefix(REFERENCE))


class FreezeMethod(FullFineTuningMethod):
    """Full fine-tuning without the embedding and the lowest `frozen_layers` layers.

    A tied output projection is frozen with the embedding. The routers of a mixture of experts stay
    frozen too.
    """

    def __init__(self, settings: Freeze) -> None:
        self.settings = settings

    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> Decoder:
        count = self.settings.frozen_layers
        if count > spec.num_layers:
            raise ConfigError(
                f"method.frozen_layers: {count}, but the base has {spec.num_layers} layers"
            )
        model = Decoder(spec, tp=tp)
        _freeze_routers(model)
        model.embedding.requires_grad_(False)
        model.layers[:count].requires_grad_(False)
        return model


class LoraMethod(FrozenBaseMethod):
    """LoRA (Hu et al. 2022): low-rank adapters of frozen linear maps train.

    A is uniform in ±1/√in, as in PEFT; B is zero. There is no dropout: its random numbers would
    depend on the layout, and a run could not resume on another one.

    Open rows and gains, which only tokens that a gate opens read, start at zero. With open rows the
    initial values are read from a folder, which names the tokens that have rows.
    """

    def __init__(
        self,
        settings: Lora,
        expansion_folder: Path,
        seed: int,
        own_tokens: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(settings, expansion_folder, seed, own_tokens)
        self.targets = settings.target_modules

    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> CausalDecoder:
        model = super()._build(spec, tp)
        self._check_targets(model)
        return model

    def _check_targets(self, model: CausalDecoder) -> None:
        """Raises ConfigError for a name in `target_modules` that no linear map has."""
        names: dict[str, None] = {}
        for path, module in model.named_modules():
            if isinstance(module, WidenedLinear):
                names[path.rsplit(".", 1)[-1]] = None
        for name in self.targets or ():
            if name not in names:
                raise ConfigError(
                    f"method.target_modules: the base, of family {model.spec.family}, has no map "
                    f"{name}; it has {', '.join(names)}"
                )

    @torch.no_grad()
    def _load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        if starts_from_expansion(self.settings):
            super()._load(model, base, tp)
            return
        bases.load_base(model, base, tp)
        for name, parameter in model.named_parameters():
            if is_base(name) or holds_new_tokens(name):
                continue
            # B is zero, so that the model starts as its base (Hu et al. 2022, section 4.1).
            shape = full_shape_of(parameter)
            whole = torch.zeros(shape)
            if name.endswith(".a"):
                # The whole factor is drawn on every rank, by a generator of its own, and then
                # split: the values do not depend on the layout.
                whole = initial_a(shape, seed=self.seed, name=name)
            fill_whole(parameter, tp, whole)


_ZEROED = (
    "attention.output.base.",
    "ffn.down.base.",
    f"{EXPERTS}down.",
    "ffn.base.shared.down.base.",
)


class LlamaProMethod(TrainingMethod):
    """LLaMA Pro (Wu et al. 2024), depth expansion: only added copies of the base's layers train.

    The layers are cut into `added_layers` groups, and each group is followed by a copy of its last
    layer. The copy's output and down maps start at zero, so that it starts as the identity.
    """

    def __init__(self, settings: LlamaPro) -> None:
        self.settings = settings

    def _stride(self, spec: DecoderSpec) -> int:
        """Every how many layers of the deeper model one is added."""
        count = self.settings.added_layers
        if spec.num_layers % count:
            raise ConfigError(
                f"method.added_layers: expected a divisor of the base's {spec.num_layers} layers, "
                f"found {count}"
            )
        # Each group of num_layers / added_layers layers becomes one layer longer.
        return spec.num_layers // count + 1

    def _base_layer(self, layer: int, spec: DecoderSpec) -> int:
        """The base's layer from which a layer of the deeper model comes."""
        # (layer + 1) // stride added layers come up to and including this one: an added layer, the
        # last of its group, thus maps to the layer before it, of which it is a copy.
        return layer - (layer + 1) // self._stride(spec)

    def _build(self, spec: DecoderSpec, tp: TensorParallel) -> Decoder:
        depth = spec.num_layers + self.settings.added_layers
        stride = self._stride(spec)
        added = frozenset(range(stride - 1, depth, stride))
        layers = tuple(spec.layers[self._base_layer(layer, spec)] for layer in range(depth))
        deeper = replace(spec, layers=layers)
        # The layers' kinds are copied too: an added layer has the window and the rotary embedding
        # of the layer that it is a copy of.
        model = Decoder(deeper, added_layers=added, tp=tp).requires_grad_(False)
        # Only the added layers train, without their routers.
        for layer in added:
            model.layers[layer].requires_grad_(True)
        _freeze_routers(model)
        return model

    def base_name(self, name: str, spec: DecoderSpec) -> str:
        if not name.startswith("layers."):
            return name
        _, layer, rest = name.split(".", 2)
        return f"layers.{self._base_layer(int(layer), spec)}.{rest}"

    @torch.no_grad()
    def _load(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        assert isinstance(model, Decoder), "it was built above"
        load_base(model, base, tp, source=partial(self.base_name, spec=base.spec))
        for layer in model.added_layers:
            for name, parameter in model.layers[layer].named_parameters():
                # Both residual branches then add nothing (Wu et al. 2024, section 3.2). Gradients
                # flow all the same: those of the zeroed maps are not zero.
                if name.startswith(_ZEROED):
                    held_values(parameter).zero_()
