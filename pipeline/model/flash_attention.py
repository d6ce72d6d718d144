"""Which flash attention a run trains with: torch's own, or FlashAttention 4 where that fits.

torch's kernels for packed documents and whole rows are FlashAttention 2. Where the distribution
`flash-attn-4` is installed, torch's dispatcher can be given its kernels instead, for the calls that
`pipeline.model.attention` makes anyway. The dispatcher then has no other: it raises an error for
heads or devices that they do not take, so what a run needs is compared before.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple, TypeAlias

import torch
from packaging.specifiers import SpecifierSet

from pipeline.errors import ConfigError, MissingPackageError, in_one_line
from pipeline.model.spec import DecoderSpec

FlashSetting: TypeAlias = Literal["auto", "torch", "fa4"]

DISTRIBUTION = "flash-attn-4"
SUPPORTED_VERSIONS = ">=4.0.0b16,<4.0.0b19"
"""What torch 2.13 can call: from 4.0.0b19 on its forward pass returns four results or more, of
which torch's adapter expects two. The extra `flash` in setup.py names the same versions."""
_INSTALL = "pip install 'scale-cpt[flash]'"

_LARGEST_HEADS = {9: 256, 10: 128}
"""The largest head size by the major number of a GPU's compute capability: Hopper and Blackwell. On
Blackwell a head of 256 has kernels of its own, which take only some of the options."""
_HEAD_MULTIPLE = 8


class FlashChoice(NamedTuple):
    """Which kernels a run trains with.

    Attributes:
        fa4: FlashAttention 4; otherwise torch's own.
        text: the kernels and the reason, for a log and a dry run.
    """

    fa4: bool
    text: str


def installed_version() -> str | None:
    """The version of FlashAttention 4 that is installed; None: none is."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def device_capability(device: torch.device | str = "cuda") -> tuple[int, int] | None:
    """The compute capability of a GPU; None where there is none."""
    if torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def choose_flash_attention(
    setting: FlashSetting,
    spec: DecoderSpec,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    installed: str | None,
) -> FlashChoice:
    """The kernels for a run on GPUs.

    Args:
        setting: the run's `flash_attention`.
        spec: the base.
        dtype: of queries, keys and values.
        capability: of the GPUs; None: not known, as in a dry run on another machine.
        installed: the version of FlashAttention 4 that is installed, if any.

    Raises:
        MissingPackageError: `fa4` is asked for, and not installed in a version that torch can call.
        ConfigError: `fa4` is asked for, and does not take the heads, their type or the GPUs.
    """
    if setting == "torch":
        return FlashChoice(fa4=False, text="torch's kernels, as flash_attention says")
    unsupported = _unsupported_reason(spec, dtype, capability)
    if setting == "fa4" and unsupported is not None:
        raise ConfigError(
            f"flash_attention: expected auto or torch, found fa4, but {unsupported}; remove it"
        )
    missing = _missing_reason(installed)
    if setting == "fa4" and missing is not None:
        raise MissingPackageError(f"flash_attention: fa4: {missing}; {_INSTALL}, or remove it")
    if unsupported is not None:
        return FlashChoice(fa4=False, text=f"torch's kernels: {unsupported}")
    if missing is not None:
        return FlashChoice(fa4=False, text=f"torch's kernels: {missing} ({_INSTALL})")
    where = ""
    if capability is None:
        where = ", on GPUs of compute capability 9 or 10, otherwise torch's kernels"
    return FlashChoice(fa4=True, text=f"FlashAttention 4 ({DISTRIBUTION} {installed}){where}")


def _unsupported_reason(
    spec: DecoderSpec, dtype: torch.dtype, capability: tuple[int, int] | None
) -> str | None:
    """Why FlashAttention 4 does not compute the run's attention; None: it does, where installed."""
    if spec.library_attention is not None:
        return spec.library_attention
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention 4 takes 16 bits, and the run is in {dtype}".replace("torch.", "")
    if spec.attention_softcap is not None:
        return "the base caps its attention scores, for which FlexAttention is taken"
    largest = _LARGEST_HEADS
    if capability is not None:
        major, minor = capability
        if major not in _LARGEST_HEADS:
            return (
                "FlashAttention 4 needs compute capability 9 or 10 (Hopper, Blackwell), found "
                f"{major}.{minor}"
            )
        largest = {major: _LARGEST_HEADS[major]}
    most = max(largest.values())
    if spec.head_dim > most or spec.head_dim % _HEAD_MULTIPLE:
        return (
            f"FlashAttention 4 takes heads of a multiple of {_HEAD_MULTIPLE} up to {most}, found "
            f"{spec.head_dim}"
        )
    return None


def _missing_reason(installed: str | None) -> str | None:
    """Why torch cannot call what is installed; None: it can."""
    if installed is None:
        return f"{DISTRIBUTION} is not installed"
    if not SpecifierSet(SUPPORTED_VERSIONS).contains(installed, prereleases=True):
        return f"torch calls {DISTRIBUTION} {SUPPORTED_VERSIONS}, found {installed}"
    return None


def activate_flash_attention() -> None:
    """Gives torch's dispatcher the kernels of FlashAttention 4, for the rest of the process.

    Raises:
        MissingPackageError: the package, or one that it needs, cannot be imported.
    """
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl("FA4")
    # What a package raises that is half installed, or for another CUDA.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise MissingPackageError(
            f"flash_attention: {DISTRIBUTION} cannot be loaded: {in_one_line(error)}; {_INSTALL}, "
            "or set flash_attention: torch"
        ) from None
