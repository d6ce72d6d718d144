"""Bases of the native families, which the package's own code computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from pipeline.config.method import Initialisers
from pipeline.model import from_hf
from pipeline.model.base_folder import BaseFolder
from pipeline.model.base_kind import BaseKind
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.families import FAMILIES, HfTensor, hf_tensor
from pipeline.model.initial_expansion import initial_expansion
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.layers import ExpertLinear
from pipeline.parallel.quantized import Fp8Recipe, QuantizedPrecision, stored_parameter
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan
from pipeline.scale.widened_linear import base_maps


class NativeBases(BaseKind):
    """The kind of `base_code: native`."""

    def takes(self, model_type: object) -> bool:
        # A folder in our own format names its type too: the reader says what to do with it.
        return not isinstance(model_type, str) or model_type in (*FAMILIES, *from_hf.OWN_FORMATS)

    def read_spec(self, path: Path) -> DecoderSpec:
        return from_hf.read_spec(path)

    def folder(self, path: Path, spec: DecoderSpec) -> BaseFolder:
        return BaseFolder(path, spec)

    def build_decoder(
        self, spec: DecoderSpec, plan: ExpansionPlan, tp: TensorParallel
    ) -> CausalDecoder:
        return Decoder(spec, plan, tp=tp)

    def load_base(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        from_hf.load_base(model, base, tp)

    def initial_expansion(
        self,
        model: CausalDecoder,
        base: BaseFolder,
        names: set[str],
        initialisers: Initialisers,
        seed: int,
    ) -> Iterator[tuple[str, Tensor]]:
        # Before the decompositions, which take minutes, and would end at a tensor that is missing.
        from_hf.check_weights(model, base)
        return initial_expansion(model, names, base.read, initialisers, seed)

    def quantize_maps(
        self, model: CausalDecoder, precision: QuantizedPrecision, recipe: Fp8Recipe
    ) -> None:
        for path, module in base_maps(model).items():
            weight = module.get_parameter("weight")
            stored = stored_parameter(weight, precision, path, model.tp.size, recipe)
            module.register_parameter("weight", stored)

    def base_alone(self, model: CausalDecoder) -> nn.Module:
        # The rows of new tokens belong to the expansion.
        return Decoder(replace(model.spec, new_tokens=0))

    def idle_parameters(self, spec: DecoderSpec, base: nn.Module) -> int:
        mixture = spec.mixture
        if mixture is None:
            return 0
        experts = 0
        for module in base.modules():
            if isinstance(module, ExpertLinear):
                experts += module.weight.numel()
        # A token takes top_k of the routed experts, all of one size; a shared expert is no
        # ExpertLinear, and counts whole.
        return experts * (mixture.experts - mixture.top_k) // mixture.experts

    def adapted_tensor(self, path: str, spec: DecoderSpec) -> HfTensor:
        return hf_tensor(path.removesuffix("adapter") + "base.weight", spec)


NATIVE = NativeBases()
