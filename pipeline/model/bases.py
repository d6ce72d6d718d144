"""Opens a base, of whichever kind it is, and builds its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import get_args

import torch

from pipeline.config.base import BaseCode
from pipeline.errors import BaseModelError, ConfigError, ExtensionError
from pipeline.extension import extensions, load_instance
from pipeline.model import from_hf
from pipeline.model.base_folder import BaseFolder
from pipeline.model.base_kind import BaseKind
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.scale.plan import ExpansionPlan

_NATIVE = "pipeline.model.native_bases:NATIVE"
_FILES_OF_TYPES = {
    "bf16": "ds_configs/zero1.json or zero3.json",
    "fp32": "ds_configs/zero1_fp32.json or zero3_fp32.json",
}
"""Settings of DeepSpeed for a run in each type."""


@cache
def offered_kinds() -> Mapping[str, str]:
    """Where each kind of base is, the core's and those of extensions, by its `base_code`.

    Raises:
        ExtensionError: an extension cannot be used, or has a kind with a code that is there, or
            that no configuration can name.
    """
    offered = {"native": _NATIVE}
    for extension in extensions():
        for code, place in extension.base_kinds().items():
            if code in offered:
                raise ExtensionError(
                    f"extension {extension.name}: its kind of bases {code} is there already, as "
                    f"{offered[code]}; give it another name"
                )
            if code not in get_args(BaseCode):
                raise ExtensionError(
                    f"extension {extension.name}: its kind of bases: expected one of "
                    f"{', '.join(get_args(BaseCode))}, found {code}; give it that name"
                )
            offered[code] = place
    return offered


@cache
def kind_named(code: str) -> BaseKind:
    """The kind of bases that `base_code` names."""
    kind: BaseKind = load_instance(offered_kinds()[code], BaseKind)
    return kind


def kind_of(spec: DecoderSpec) -> BaseKind:
    """The kind of a base."""
    return kind_named(spec.base_code)


def read_spec(path: Path, code: BaseCode | None = None) -> DecoderSpec:
    """The architecture that the folder's config.json describes; `path` may be that file itself.

    Args:
        path: the folder.
        code: whose code is to compute the base; None: ours where it has a family for the base's
            `model_type`, else transformers'.

    Raises:
        BaseModelError: the file is missing or damaged, or the architecture is not supported.
    """
    kind = _kind_by_default(path) if code is None else kind_named(code)
    return kind.read_spec(path)


def _kind_by_default(path: Path) -> BaseKind:
    """The first kind that takes a base of this type."""
    try:
        _, values = from_hf.read_config(path)
    except BaseModelError:
        return kind_named("native")  # its reader says what is wrong
    model_type = from_hf.model_type_of(values)
    for code in offered_kinds():
        kind = kind_named(code)
        if kind.takes(model_type):
            return kind
    return kind_named("native")


def open_base(path: Path, code: BaseCode | None = None) -> BaseFolder:
    """Opens a base model's folder; `code` as in `read_spec`.

    Raises:
        BaseModelError: the folder or its config is missing or damaged, or its architecture is not
            supported.
    """
    spec = read_spec(path, code)
    return kind_of(spec).folder(path, spec)


def build_decoder(
    spec: DecoderSpec, plan: ExpansionPlan, tp: TensorParallel = SINGLE
) -> CausalDecoder:
    """The base of this architecture, widened by `plan`; its values are unset.

    Raises:
        LayoutError: the base cannot be split over `tp.size` ranks.
    """
    return kind_of(spec).build_decoder(spec, plan, tp)


def load_base(model: CausalDecoder, base: BaseFolder, tp: TensorParallel = SINGLE) -> None:
    """Fills the base of `model` with the folder's weights.

    Raises:
        BaseModelError: a weight is missing, or does not fit config.json.
    """
    kind_of(model.spec).load_base(model, base, tp)


def check_dtype(spec: DecoderSpec, dtype: torch.dtype) -> None:
    """Checks that a base runs in this type, before its weights are read.

    Raises:
        ConfigError: it does not.
    """
    reason = unsupported_in(spec, dtype)
    if reason is None:
        return
    base = f"{spec.noun} (model_type {spec.family}), {reason}"
    found = str(dtype).removeprefix("torch.")
    allowed = runnable_types(spec)
    if not allowed:
        raise ConfigError(f"base: no type of numbers fits {base}, found {found}; take another base")
    files = _FILES_OF_TYPES[allowed[0]]
    raise ConfigError(
        f"deepspeed: expected {' or '.join(allowed)} with {base}, found {found}; take {files}"
    )


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
    fp32 where it does not run in that one."""
    if unsupported_in(base.spec, base.dtype) is not None:
        return torch.float32
    return base.dtype


def unsupported_in(spec: DecoderSpec, dtype: torch.dtype) -> str | None:
    """Why a base does not run in this type, as a clause about the base; None: it does."""
    return kind_of(spec).dtype_unsupported_reason(spec, dtype)
