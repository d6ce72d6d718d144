"""Fills a hosted decoder with the base as transformers loads it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.decoder import HostedDecoder
from pipeline.extensions.hosted.folder import HostedFolder
from pipeline.extensions.hosted.quantized_maps import as_matrix
from pipeline.parallel.parameters import quantization_of, zero_partition_of


@torch.no_grad()
def load_hosted_base(model: HostedDecoder, base: HostedFolder) -> None:
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
