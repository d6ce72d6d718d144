"""Opens a base and builds its decoder: as a family of our own code, or hosted.

This is the one place that chooses between `Decoder` and `HostedDecoder`; everything above takes a
`CausalDecoder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config.base import BaseCode
from pipeline.errors import BaseModelError, ConfigError
from pipeline.hosted.decoder import HostedDecoder
from pipeline.hosted.folder import HostedFolder
from pipeline.hosted.kernels import describe_missing_kernels
from pipeline.hosted.quantized_maps import as_matrix
from pipeline.hosted.read_spec import read_hosted_spec
from pipeline.hosted.spec import HostedSpec
from pipeline.hosted.transformers_model import dtype_unsupported_reason
from pipeline.model import from_hf
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.families import FAMILIES
from pipeline.model.from_hf import OWN_FORMATS
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.quantized import quantization_of
from pipeline.parallel.sharding import zero_partition_of
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.plan import ExpansionPlan

_FILES_OF_TYPES = {
    "bf16": "ds_configs/zero1.json or zero3.json",
    "fp32": "ds_configs/zero1_fp32.json or zero3_fp32.json",
}
"""Settings of DeepSpeed for a run in each type."""


def read_spec(path: Path, code: BaseCode | None = None) -> DecoderSpec:
    """The architecture that the folder's config.json describes; `path` may be that file itself.

    Args:
        path: the folder.
        code: whose code is to compute the base; None: ours where it has a family for the base's
            `model_type`, else transformers'.

    Raises:
        BaseModelError: the file is missing or damaged, or the architecture is not supported.
    """
    if code == "native" or (code is None and not _is_hosted_by_default(path)):
        return from_hf.read_spec(path)
    return read_hosted_spec(path)


def _is_hosted_by_default(path: Path) -> bool:
    """Whether the base's type is none of the native families."""
    try:
        _, values = from_hf.read_config(path)
    except BaseModelError:
        return False  # the native reader says what is wrong
    model_type = from_hf.model_type_of(values)
    # A folder in our own format names its type too: the native reader says what to do with it.
    known = (*FAMILIES, *OWN_FORMATS)
    return isinstance(model_type, str) and model_type not in known


def open_base(path: Path, code: BaseCode | None = None) -> BaseFolder:
    """Opens a base model's folder; `code` as in `read_spec`.

    Raises:
        BaseModelError: the folder or its config is missing or damaged, or its architecture is not
            supported.
    """
    spec = read_spec(path, code)
    if isinstance(spec, HostedSpec):
        return HostedFolder(path, spec)
    return BaseFolder(path, spec)


def build_decoder(
    spec: DecoderSpec, plan: ExpansionPlan, tp: TensorParallel = SINGLE
) -> CausalDecoder:
    """The base of this architecture, widened by `plan`; its values are unset.

    Raises:
        LayoutError: the base cannot be split over `tp.size` ranks.
    """
    if isinstance(spec, HostedSpec):
        return HostedDecoder(spec, plan)
    return Decoder(spec, plan, tp=tp)


def load_base(model: CausalDecoder, base: BaseFolder, tp: TensorParallel = SINGLE) -> None:
    """Fills the base of `model` with the folder's weights.

    Raises:
        BaseModelError: a weight is missing, or does not fit config.json.
    """
    if isinstance(model, HostedDecoder):
        assert isinstance(base, HostedFolder), "its spec was read from it"
        _load_hosted_base(model, base)
    else:
        from_hf.load_base(model, base, tp)


def check_dtype(spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Checks that a base runs in this type, before its weights are read.

    Raises:
        ConfigError: it is hosted, and does not; see `dtype_unsupported_reason`.
    """
    reason = unsupported_in(spec, dtype)
    if reason is None:
        return
    base = f"a hosted base (model_type {spec.family}), {reason}"
    found = str(dtype).removeprefix("torch.")
    allowed = runnable_types(spec)
    if not allowed:
        raise ConfigError(f"base: no type of numbers fits {base}, found {found}; take another base")
    files = _FILES_OF_TYPES[allowed[0]]
    raise ConfigError(
        f"deepspeed: expected {' or '.join(allowed)} with {base}, found {found}; take {files}"
    )


def missing_kernels(spec: DecoderSpec) -> str | None:
    """Which packages would speed the base up and are not installed, as a line; None: none."""
    return describe_missing_kernels(spec) if isinstance(spec, HostedSpec) else None


def runnable_types(spec: DecoderSpec) -> list[str]:
    """Which of bf16 and fp32 a base runs in, in this order; empty where no type fits it.

    fp16 is no remedy: a base that does not run in bf16 does not run in fp16 either.
    """
    types: list[str] = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        if unsupported_in(spec, dtype) is None:
            types.append(name)
    return types


def computed_dtype(base: BaseFolder) -> torch.dtype:
    """The type in which the base computes outside training: the one that it was published in, but
    fp32 where a hosted base does not run in it."""
    if unsupported_in(base.spec, base.dtype) is not None:
        return torch.float32
    return base.dtype


def unsupported_in(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Why a hosted base does not run in this type, as a clause about the base; None: it does, as
    every native base."""
    if not isinstance(spec, HostedSpec):
        return None
    return dtype_unsupported_reason(spec, dtype)


@torch.no_grad()
def _load_hosted_base(model: HostedDecoder, base: HostedFolder) -> None:
    """Copies parameters and buffers of the base as transformers loads it.

    Every rank loads the whole base into its host's memory for this moment.

    Raises:
        BaseModelError: transformers keeps a parameter in a wider dtype than the model's.
    """
    whole = base.whole(model.dtype)
    values = dict(whole.named_parameters())
    _check_no_wider_dtype(values, model.dtype, base)
    for name, parameter in model.base.named_parameters():
        quantization = quantization_of(parameter)
        if quantization is None:
            _set(parameter, values[name])
        else:
            module = model.base.get_submodule(name.rpartition(".")[0])
            quantization.write(parameter, as_matrix(module, values[name]))
    for name, buffer in whole.named_buffers():
        # Also those that no file holds, such as rotary frequencies: transformers computes them in
        # fp32, and the model may have been built in 16 bits.
        parent, _, leaf = name.rpartition(".")
        module = model.base.get_submodule(parent)
        module._buffers[leaf] = buffer.to(model.device)


def _check_no_wider_dtype(
    values: Mapping[str, Tensor], dtype: torch.dtype, base: HostedFolder
) -> None:
    """Checks that no parameter has a wider dtype than the model.

    Of some types transformers keeps parameters in fp32 in a model of 16 bits (routers, sinks), and
    its code computes with them in fp32. DeepSpeed casts every parameter, so that the base would be
    another one. In a model of 64 bits, with which an export is verified, they may stay in fp32.

    Raises:
        BaseModelError: a parameter has a wider dtype.
    """
    for name, value in values.items():
        if value.dtype.itemsize > dtype.itemsize:
            expected = str(dtype).removeprefix("torch.")
            found = str(value.dtype).removeprefix("torch.")
            raise BaseModelError(
                f"{base.path}: {name}: expected {expected} as the model, found {found}, in which "
                f"transformers keeps this parameter of a {base.spec.family}; run in fp32 "
                "(deepspeed: ds_configs/zero1_fp32.json or zero3_fp32.json)"
            )


def _set(parameter: Tensor, whole: Tensor) -> None:
    """Sets what this rank holds of `parameter` from its whole values."""
    partition = zero_partition_of(parameter)
    if partition is None:
        parameter.copy_(whole)
        return
    own = whole.flatten()[partition.first : partition.first + partition.length]
    partition.values.zero_()
    partition.values[: partition.length].copy_(own)
