"""Every attention kernel that the device may take, against attention as in a textbook."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting, dtype_name, largest_error
from benchmarks.gpu_step.peak_memory import PeakMemory
from pipeline.model.attention import (
    Attend,
    CausalAttention,
    Documents,
    MaskedAttention,
    attention_kernel,
    document_mask,
)

_GIB = 2**30
_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    """A layer's attention: its heads, and what limits or bounds the scores."""

    query_heads: int
    key_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        text = f"{self.query_heads}/{self.key_heads} heads of {self.head_dim}"
        if self.window is not None:
            text += f", window {self.window}"
        if self.softcap is not None:
            text += ", soft-capped"
        return text


# Grouped heads, a window and soft-capping may each choose another kernel.
_CASES = (
    Case(4, 4, 64),
    Case(6, 2, 128),
    Case(6, 2, 128, window=16),
    Case(6, 2, 128, window=16, softcap=2.0),
)


def check_attention(setting: Setting) -> Iterator[CheckRow]:
    """Every kernel that the device may take, forward and gradient, against a literal one in
    fp64."""
    length = 300 if setting.on_gpu else 48
    layouts = {
        "one document": (length,),
        # Lengths that no tile of a kernel divides.
        "ragged": (5, length // 2, length - length // 2 - 5),
        "single": (1,) * length,
    }
    for (dtype, tolerance), case in product(_TOLERANCES.items(), _CASES):
        for layout, lengths in layouts.items():
            documents = _documents(lengths, setting.device)
            kernels = _kernels(case, documents, dtype, setting, is_whole=layout == "one document")
            for name, error in _errors(kernels, case, documents, dtype):
                check = f"{name}, {dtype_name(dtype)}, {case}, {layout}: results and gradients"
                yield CheckRow(check, error < tolerance, f"{error:.1e}")
    yield from _check_memory(setting)


def _documents(lengths: tuple[int, ...], device: torch.device) -> Documents:
    """Two rows of documents of these lengths."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    documents = Documents.of(ids.expand(2, -1))
    return documents.moved(lambda tensor: tensor.to(device))


def _kernels(
    case: Case, documents: Documents, dtype: torch.dtype, setting: Setting, *, is_whole: bool
) -> list[Attend]:
    """The kernel that a model would choose on this device, and the others that must agree."""

    def chosen(documents: Documents | None) -> Attend:
        return attention_kernel(
            documents,
            setting.device,
            dtype,
            case.head_dim,
            window=case.window,
            softcap=case.softcap,
        )

    kernels = [chosen(documents)]
    if setting.on_gpu:
        # What a CPU chooses: scores of all pairs, and a mask.
        mask = document_mask(documents.ids, dtype, case.window)
        kernels.append(MaskedAttention(mask, softcap=case.softcap))
    if is_whole and case.window is None:
        # Rows of one document need no mask of documents.
        kernels.append(CausalAttention())
        kernels.append(chosen(None))
    return kernels


def _errors(
    kernels: list[Attend], case: Case, documents: Documents, dtype: torch.dtype
) -> Iterator[tuple[str, float]]:
    """The name of each kernel, and how far its results and gradients are from the literal ones."""
    heads = _random_heads(documents.ids.shape, case, dtype, documents.ids.device)
    # A random sum of the results has gradients that differ from token to token.
    weights = torch.randn(heads[0].shape, device=documents.ids.device)
    # From the same rounded values: what is compared is the kernel, and not the input's type.
    exact = [tensor.detach().double().requires_grad_() for tensor in heads]
    query, key, value = exact
    literal = literal_attention(query, key, value, documents.ids, case.window, case.softcap)
    expected = _with_gradients(literal, weights, exact)
    for kernel in kernels:
        found = _with_gradients(kernel(*heads), weights, heads)
        errors: list[float] = []
        for own, wanted in zip(found, expected, strict=True):
            largest = wanted.abs().max().clamp(min=1.0)
            errors.append(float((own - wanted).abs().max() / largest))
        yield getattr(kernel, "__name__", type(kernel).__name__), largest_error(errors)


def _random_heads(
    size: tuple[int, ...], case: Case, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Queries, keys and values [B, S, H, K] of `size` B, S, which take gradients."""
    tensors: list[Tensor] = []
    for heads in (case.query_heads, case.key_heads, case.key_heads):
        values = torch.randn(*size, heads, case.head_dim, device=device)
        tensors.append(values.to(dtype).requires_grad_())
    return tensors


def literal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention as in a textbook, one head at a time; shapes as in `Attend`, ids: [B, S]."""
    # A token sees those of its document that are not later, at most `window` with itself.
    visible = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    query_heads = query.shape[2]
    key_heads = key.shape[2]
    heads = []
    for head in range(query_heads):
        # Grouped heads: neighbouring queries share a key and a value.
        group = head * key_heads // query_heads
        scores = query[:, :, head] @ key[:, :, group].mT / query.shape[-1] ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        heads.append(shares @ value[:, :, group])
    return torch.stack(heads, dim=2)


def _with_gradients(result: Tensor, weights: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of its sum with these weights for each input."""
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


def _check_memory(setting: Setting) -> Iterator[CheckRow]:
    """Rows of one document make no scores of all pairs of tokens, whatever the type and the size of
    the heads."""
    length = 8192 if setting.on_gpu else 64
    # Of torch's kernels without scores only flash attention takes grouped heads, and it takes
    # neither fp32 nor heads beyond 256: the second and the third case need keys for every head.
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 128), (torch.bfloat16, 320)):
        case = Case(4, 1, head_dim)
        heads = _random_heads((1, length), case, dtype, setting.device)
        scores = case.query_heads * length**2 * dtype.itemsize / _GIB
        peak = PeakMemory(setting.device)
        attention_kernel(None, setting.device, dtype, head_dim)(*heads).sum().backward()
        taken = peak.gib()
        check = (
            f"{dtype_name(dtype)}, grouped heads of {head_dim}: rows without scores of all pairs"
        )
        if taken is None:
            yield CheckRow(check, None, "seen on a GPU only")
        else:
            found = f"{taken:.3f} GiB; scores: {scores:.3f} GiB"
            yield CheckRow(check, taken < scores, found)
