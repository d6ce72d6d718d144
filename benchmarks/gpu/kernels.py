"""Single kernels beside their alternatives: the loss, Liger's norm, rotary and SwiGLU, and joined products.

Nothing in training depends on these figures yet: docs/gpu.md says what would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.setting import BASES, STORIES, Row, Setting
from benchmarks.gpu_step import Peak, Variant, synchronize
from pipeline.model.from_hf import read_spec
from pipeline.model.layers import RotaryEmbedding
from pipeline.model.output import HiddenStates, OutputProjection
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import default_dtype
from pipeline.parallel.topology import SINGLE

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of a kernel's results and gradients, as a share of the largest value."""
Streams = tuple[Tensor, Tensor]


class Kernel(NamedTuple):
    """A way to compute the same from the same inputs; the weights of its own that train; the packages that it lacks."""

    name: str
    compute: Callable[..., Tensor | Streams]
    missing: str = ""
    trained: tuple[Tensor, ...] = ()


def check_kernels(setting: Setting) -> Iterator[Row]:
    """Each kernel's time and memory, forward and backward, and whether it agrees with torch's own."""
    spec = read_spec(BASES / "llama-3.2-1b.json" if setting.on_gpu else STORIES / "config.json")
    tokens, dtype = (8192, torch.bfloat16) if setting.on_gpu else (16, torch.float32)
    with default_dtype(dtype), setting.device:
        yield from _loss(setting, spec, tokens)
        yield from _layer_kernels(setting, spec, tokens)
        yield from _products(setting, spec, tokens)


def _loss(setting: Setting, spec: DecoderSpec, tokens: int) -> Iterator[Row]:
    """The output projection and its loss, with a frozen and with a trained projection."""

    def liger(x: Tensor, weight: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        loss: Tensor = liger_fused_linear_cross_entropy(x, weight, targets, reduction="sum")
        return loss

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        projection.base = weight  # type: ignore[assignment]  # a leaf that no module owns
        return projection(HiddenStates(x), targets).total

    size, vocabulary = spec.widths.hidden_size, spec.vocab_size
    projection = OutputProjection(vocabulary, size, None, threshold=0.0, tp=SINGLE)
    del projection.base  # each call brings its own
    targets = torch.randint(vocabulary, (tokens,))
    kernels = [
        Kernel(
            "logits as a whole", lambda x, weight: F.cross_entropy((x @ weight.T).float(), targets, reduction="sum")
        ),
        Kernel("this project's, in chunks", ours),
        Kernel("Liger's", liger, _lacks_liger()),
    ]
    x, weight = torch.randn(tokens, size), torch.randn(vocabulary, size) / size**0.5
    yield from _compared("loss, frozen projection", kernels, [x.requires_grad_(), weight], setting)
    yield from _compared("loss, trained projection", kernels, [x, weight.requires_grad_()], setting)


def _layer_kernels(setting: Setting, spec: DecoderSpec, tokens: int) -> Iterator[Row]:
    """Norm, rotary embedding and SwiGLU: as the layers compute them, the same compiled, and Liger's."""

    def liger_norm(x: Tensor, weight: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_rms_norm

        result: Tensor = liger_rms_norm(x, weight, spec.norm_eps, in_place=False)
        return result

    def liger_rotary(heads: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_rope

        cos, sin = (part.squeeze(-2) for part in (table.cos, table.sin))
        # It rotates in place, in the layout [B, H, S, K].
        query, _ = liger_rope(heads.transpose(1, 2).clone(), heads.transpose(1, 2)[:, :1].clone(), cos, sin)
        return query.transpose(1, 2)

    def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.transformers.functional import liger_swiglu

        result: Tensor = liger_swiglu(gate, up)
        return result

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * F.rms_norm(x.float(), x.shape[-1:], eps=spec.norm_eps).to(x.dtype)  # as RMSNorm

    widths = spec.widths
    rotary = spec.layers[0].rotary
    assert rotary is not None
    table = RotaryEmbedding().table(rotary, torch.arange(tokens).unsqueeze(0), None, torch.get_default_dtype())
    heads = torch.randn(1, tokens, widths.num_attention_heads, spec.head_dim)
    cases: list[tuple[str, Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = [
        ("RMSNorm", norm, liger_norm, [torch.randn(tokens, widths.hidden_size), torch.ones(widths.hidden_size)]),
        ("rotary", table.rotate, liger_rotary, [heads]),
        (
            "SwiGLU",
            lambda gate, up: F.silu(gate) * up,
            liger_swiglu,
            [torch.randn(tokens, widths.intermediate_size) for _ in range(2)],
        ),
    ]
    for name, ours, ligers, inputs in cases:
        compiled = torch.compile(ours, backend="inductor" if setting.on_gpu else "eager")
        kernels = [
            Kernel("torch", ours),
            Kernel("torch, compiled", compiled),
            Kernel("Liger's", ligers, _lacks_liger()),
        ]
        yield from _compared(name, kernels, [own.requires_grad_() for own in inputs], setting)


def _products(setting: Setting, spec: DecoderSpec, tokens: int) -> Iterator[Row]:
    """A widened linear map in four products, and with [W12; W22], which both multiply x_up, as one.

    [W; W21] on x as one would give up that the base's product is the base model's own call, and so exact.
    """
    hidden = spec.widths.hidden_size
    for name, rows in (("query", hidden), ("FFN up", spec.widths.intermediate_size)):
        w, w21 = torch.randn(rows, hidden), torch.randn(rows // 8, hidden).requires_grad_()
        w12, w22 = (torch.randn(size, hidden // 8).requires_grad_() for size in (rows, rows // 8))
        both = torch.cat([w12, w22]).detach().requires_grad_()

        def separate(
            x: Tensor, x_up: Tensor, w: Tensor = w, w21: Tensor = w21, w12: Tensor = w12, w22: Tensor = w22
        ) -> Streams:
            return F.linear(x, w) + F.linear(x_up, w12), F.linear(x, w21) + F.linear(x_up, w22)

        def joined(x: Tensor, x_up: Tensor, w: Tensor = w, w21: Tensor = w21, both: Tensor = both) -> Streams:
            to_base, to_expansion = F.linear(x_up, both).split([len(w), len(w21)], dim=-1)
            return F.linear(x, w) + to_base, F.linear(x, w21) + to_expansion

        kernels = [
            Kernel("four products", separate, trained=(w12, w21, w22)),
            Kernel("[W12; W22] as one", joined, trained=(both, w21)),
        ]
        inputs = [torch.randn(tokens, size).requires_grad_() for size in (hidden, hidden // 8)]
        yield from _compared(f"widened {name}", kernels, inputs, setting)


def _lacks_liger() -> str:
    return Variant("", liger=True).missing


def _compared(what: str, kernels: Sequence[Kernel], inputs: list[Tensor], setting: Setting) -> Iterator[Row]:
    """A row per kernel; the others have to agree with the first. Liger's may overwrite its inputs, and is last."""
    expected: list[Tensor] = []
    for kernel in kernels:
        name = f"{what}: {kernel.name}"
        if kernel.missing:
            yield Row(name, None, f"skipped: {kernel.missing} not installed")
            continue
        try:
            found = _with_gradients(kernel, inputs)
        except Exception as fault:  # noqa: BLE001  # another package's kernel: the others are measured all the same
            yield Row(name, False, f"{type(fault).__name__}: {fault}"[:400])
            continue
        expected = expected or found
        error = max(
            float((own - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
            for own, wanted in zip(found, expected, strict=True)
        )
        del found
        peak = Peak(setting.device)
        seconds = []
        for _ in range(20 if setting.on_gpu else 1):
            synchronize(setting.device)
            began = time.perf_counter()
            _with_gradients(kernel, inputs)
            synchronize(setting.device)
            seconds.append(time.perf_counter() - began)
        taken = peak.gib()
        memory = "" if taken is None else f"{taken:.2f} GiB, "
        measured = f"{1e3 * statistics.median(seconds):.3f} ms, {memory}off by {error:.1e}"
        yield Row(name, error < _TOLERANCE[inputs[0].dtype], measured)


def _with_gradients(kernel: Kernel, inputs: list[Tensor]) -> list[Tensor]:
    """The results, and the gradients of the inputs that need one."""
    found = kernel.compute(*inputs)
    results = [found] if isinstance(found, Tensor) else list(found)
    wanted = [own for own in inputs if own.requires_grad]
    total = torch.stack([result.sum() for result in results]).sum()
    gradients = torch.autograd.grad(total, [*wanted, *kernel.trained])
    return [*(result.detach() for result in results), *gradients[: len(wanted)]]
