"""The kind of bases that transformers computes: what the core asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.config.base import BasePrecision
from pipeline.config.method import Initialisers, Method
from pipeline.config.run import RunConfig
from pipeline.extensions.hosted.decoder import HostedDecoder
from pipeline.extensions.hosted.folder import HostedFolder
from pipeline.extensions.hosted.initial_expansion import initial_hosted_expansion
from pipeline.extensions.hosted.kernels import describe_missing_kernels
from pipeline.extensions.hosted.load_base import load_hosted_base
from pipeline.extensions.hosted.mixtures import idle_parameters
from pipeline.extensions.hosted.quantized_maps import quantize_maps, quantized_share
from pipeline.extensions.hosted.read_spec import read_hosted_spec
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.transformers_model import dtype_unsupported_reason
from pipeline.extensions.hosted.unsupported import check_hosted_method, check_hosted_run
from pipeline.model.base_folder import BaseFolder
from pipeline.model.base_kind import BaseKind
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.families import HfTensor
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.quantized import Fp8Recipe, QuantizedPrecision
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import ExpansionPlan


def _spec(spec: DecoderSpec) -> HostedSpec:
    assert isinstance(spec, HostedSpec), "a spec says of which kind it is"
    return spec


def _decoder(model: CausalDecoder) -> HostedDecoder:
    assert isinstance(model, HostedDecoder), "it was built of a HostedSpec"
    return model


def _folder(base: BaseFolder) -> HostedFolder:
    assert isinstance(base, HostedFolder), "its spec was read from it"
    return base


class HostedBases(BaseKind):
    """The kind of `base_code: transformers`."""

    scale_export = "pipeline.extensions.hosted.export:hosted_export"

    def takes(self, model_type: object) -> bool:
        # Of a type that no native family has, the experiments on its structure decide.
        return True

    def read_spec(self, path: Path) -> DecoderSpec:
        return read_hosted_spec(path)

    def folder(self, path: Path, spec: DecoderSpec) -> BaseFolder:
        return HostedFolder(path, _spec(spec))

    def build_decoder(
        self, spec: DecoderSpec, plan: ExpansionPlan, tp: TensorParallel
    ) -> CausalDecoder:
        return HostedDecoder(_spec(spec), plan)

    def load_base(self, model: CausalDecoder, base: BaseFolder, tp: TensorParallel) -> None:
        load_hosted_base(_decoder(model), _folder(base))

    def initial_expansion(
        self,
        model: CausalDecoder,
        base: BaseFolder,
        names: set[str],
        initialisers: Initialisers,
        seed: int,
    ) -> Iterator[tuple[str, Tensor]]:
        whole_base = _folder(base).whole(base.dtype)
        return initial_hosted_expansion(_decoder(model), whole_base, names, initialisers, seed)

    def quantize_maps(
        self, model: CausalDecoder, precision: QuantizedPrecision, recipe: Fp8Recipe
    ) -> None:
        quantize_maps(_decoder(model), precision, recipe)

    def base_alone(self, model: CausalDecoder) -> nn.Module:
        return _decoder(model).base

    def idle_parameters(self, spec: DecoderSpec, base: nn.Module) -> int:
        return idle_parameters(_spec(spec), base)

    def adapted_tensor(self, path: str, spec: DecoderSpec) -> HfTensor:
        # An adapter has a path such as layers.3.adapter.self_attn.q_proj.
        _, index, _, within = path.split(".", 3)
        structure = _spec(spec).structure
        layer = structure.layer_name(structure.layers[int(index)])
        return HfTensor(f"{layer}.{within}.weight")

    def check_run(self, config: RunConfig, spec: DecoderSpec, tp_size: int) -> None:
        check_hosted_run(config, _spec(spec), tp_size)

    def check_method(self, method: Method, spec: DecoderSpec) -> None:
        check_hosted_method(method, _spec(spec))

    def dtype_unsupported_reason(self, spec: DecoderSpec, dtype: torch.dtype) -> str | None:
        return dtype_unsupported_reason(_spec(spec), dtype)

    def missing_kernels(self, spec: DecoderSpec) -> str | None:
        return describe_missing_kernels(_spec(spec))

    def dry_run_rows(
        self, spec: DecoderSpec, base_precision: BasePrecision
    ) -> Iterator[tuple[str, str]]:
        yield "base", _spec(spec).describe()
        slow = self.missing_kernels(spec)
        if slow is not None:
            yield "kernels", slow
        if base_precision != "bf16":
            yield (
                "base",
                f"{quantized_share(_spec(spec)):.0%} of its parameters are stored in "
                f"{base_precision}: the linear maps that take every token; embedding, norms, "
                "output map and experts stay",
            )

    def first_config_comment(self, spec: DecoderSpec) -> str:
        model_class = _spec(spec).structure.model_class
        return (
            f"transformers computes this base ({model_class}), with the expansion beside its "
            "blocks\n(docs/architectures.md#hosted-bases)"
        )

    def traced(self, spec: DecoderSpec) -> AbstractContextManager[None]:
        # Imported here: whoever only trains a base needs no estimates of it.
        from pipeline.extensions.hosted.meta_device import transformers_code_traced

        return transformers_code_traced(_spec(spec))


HOSTED = HostedBases()
