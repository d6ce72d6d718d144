"""LoRA (Hu et al. 2022): the base is frozen, and a low-rank map trains beside its linear maps.

Without dropout: its random numbers would differ from layout to layout, and a run could not go on at another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pipeline.config.method import Lora
from pipeline.errors import ConfigError
from pipeline.methods.method import ActivationCheckpointing, TrainingMethod
from pipeline.model.base_folder import BaseFolder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import is_base, load_base
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.low_rank import LowRankAdapter
from pipeline.parallel.parameter import fill, full_shape_of, partition_of
from pipeline.parallel.sharding import split
from pipeline.parallel.stored import Rows
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.initialisers import seeded
from pipeline.scale.linear import WidenedLinear


class LoraMethod(TrainingMethod):
    """The adapters train. A starts as PEFT starts it, uniform in ±1/√in; B starts at zero."""

    def __init__(self, settings: Lora, seed: int) -> None:
        self.settings = settings
        self.seed = seed

    def build(
        self, spec: DecoderSpec, tp: TensorParallel, activation_checkpointing: ActivationCheckpointing
    ) -> Decoder:
        model = Decoder(spec, tp=tp, activation_checkpointing=activation_checkpointing).requires_grad_(False)
        for linear in self._targets(model):
            weight = linear.base.get_parameter("weight")
            linear.adapter = LowRankAdapter(weight, self.settings.rank, scale=self.settings.scale, tp=tp)
        return model

    def _targets(self, model: Decoder) -> Iterator[WidenedLinear]:
        """The maps that get an adapter."""
        maps = [(path.rsplit(".", 1)[-1], one) for path, one in model.named_modules() if isinstance(one, WidenedLinear)]
        known = list(dict.fromkeys(name for name, _ in maps))
        wanted = self.settings.target_modules or known
        if unknown := [name for name in wanted if name not in known]:
            raise ConfigError(
                f"method.target_modules: the base, of family {model.spec.family}, has no map {unknown[0]}; "
                f"it has {', '.join(known)}"
            )
        return (linear for name, linear in maps if name in wanted)

    @torch.no_grad()
    def load(self, model: Decoder, base: BaseFolder, tp: TensorParallel) -> None:
        load_base(model, base, tp)
        for name, parameter in model.named_parameters():
            if not is_base(name):
                whole = self._initial(name, full_shape_of(parameter))
                fill(parameter, tp, partial(_rows, split(whole, partition_of(parameter), tp.rank, tp.size)))

    def _initial(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".b"):
            return torch.zeros(shape)
        return torch.empty(shape).uniform_(-1, 1, generator=seeded(self.seed, name)) * shape[1] ** -0.5


def _rows(shard: Tensor, rows: Rows) -> Tensor:
    return shard[slice(*rows)]
