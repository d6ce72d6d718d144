"""Parity with the base, its exact preservation, and the attention kernels, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from benchmarks.gpu.setting import CheckRow, Setting, small_methods, started
from benchmarks.gpu_step.models import our_model, set_randomly
from benchmarks.gpu_step.peak_memory import PeakMemory
from benchmarks.results import BASES, STORIES
from pipeline.config.base import BasePrecision, Fp8Scaling, GradientPrecision
from pipeline.config.method import FullFineTuning, Lora
from pipeline.methods import quantize_base
from pipeline.model.attention import (
    Attend,
    CausalAttention,
    Documents,
    MaskedAttention,
    attention_kernel,
    document_mask,
)
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.quantized import (
    Quantization,
    computes_in_fp8,
    frozen_product,
)
from pipeline.parallel.sharding import default_dtype

# --- Parity and preservation ----------------------------------------------------------------------


@torch.no_grad()
def check_parity(setting: Setting) -> Iterator[CheckRow]:
    """The base as transformers runs it; at step 0 no method differs from the base; then its stream
    stays exact."""
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(512, (2, 96), generator=torch.Generator().manual_seed(0)).to(
        setting.device
    )
    reference = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).to(
        setting.device
    )
    theirs = reference(tokens).logits
    cases = product(((torch.float32, 1e-3), (torch.bfloat16, 0.5)), get_args(BasePrecision))
    for (dtype, tolerance), precision in cases:
        name = str(dtype).removeprefix("torch.") + (
            "" if precision == "bf16" else f", base in {precision}"
        )
        plain_method = (
            FullFineTuning(name="fft") if precision == "bf16" else Lora(name="lora", rank=4)
        )
        plain = started(plain_method, setting, dtype, base_precision=precision)
        base_logits = plain.logits(tokens)
        difference = float((base_logits - theirs).abs().max())
        what = f"{name}: logits of the base, against transformers in fp32"
        yield CheckRow(
            what,
            difference < tolerance if precision == "bf16" else None,
            f"off by {difference:.2g}",
        )
        for variant, method in small_methods().items():
            if precision != "bf16" and variant != "adapt":
                continue  # one variant shows what the form of the base changes
            model = started(method, setting, dtype, base_precision=precision)
            difference = float((model.logits(tokens) - base_logits).abs().max())
            yield CheckRow(
                f"{name}, {variant}: logits at step 0 less the base's",
                difference == 0,
                str(difference),
            )
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
            yield _preservation(f"{name}, {variant}", model, plain, tokens)
            documents = Documents.of(torch.arange(96).div(40, rounding_mode="floor").expand(2, -1))
            packed = documents.moved(lambda tensor: tensor.to(setting.device))
            yield _preservation(
                f"{name}, {variant}, packed documents", model, plain, tokens, packed
            )
    yield from _preservation_at_size(setting)


def _preservation(
    name: str,
    model: CausalDecoder,
    base: CausalDecoder,
    tokens: Tensor,
    documents: Documents | None = None,
) -> CheckRow:
    """Whether a trained model keeps the base's stream and logits, bit for bit."""
    batch = (tokens, None, documents)
    expected = base.hidden_states(*batch).x, base.logits(*batch)
    kept = model.hidden_states(*batch, path="preserved").x, model.logits(*batch, path="base")
    moved = float((model.logits(*batch) - expected[1]).abs().max())
    exact = all(torch.equal(own, wanted) for own, wanted in zip(kept, expected, strict=True))
    largest = max(
        float((own - wanted).abs().max()) for own, wanted in zip(kept, expected, strict=True)
    )
    found = f"{'bit-equal' if exact else f'off by {largest:.2g}'} (what was added moves the logits by {moved:.2g})"
    return CheckRow(
        f"{name}: the base's stream and logits in a trained model", exact and moved > 0, found
    )


def _preservation_at_size(setting: Setting) -> Iterator[CheckRow]:
    """The same at the sizes of a real base, where other matrix kernels run."""
    spec_name = "llama-3.2-1b" if setting.on_gpu else "llama-1m"
    spec = read_spec(BASES / f"{spec_name}.json")
    length = 2048 if setting.on_gpu else 64
    tokens = torch.randint(spec.vocab_size, (1, length), device=setting.device)
    for dtype, precision in product((torch.float32, torch.bfloat16), get_args(BasePrecision)):
        with default_dtype(dtype), setting.device:
            model = our_model("adapt", spec, 3, precision)
            plain = Decoder(spec).requires_grad_(False)
        if precision != "bf16":
            quantize_base(plain, precision)
        for parameter in model.parameters():
            set_randomly(parameter)
        own = dict(model.named_parameters())
        for name, parameter in plain.named_parameters():
            parameter.copy_(own[name])
        base = "" if precision == "bf16" else f", base in {precision}"
        yield _preservation(
            f"{str(dtype).removeprefix('torch.')}, adapt of {spec_name}{base}", model, plain, tokens
        )
    yield from _products_in_fp8(setting)


def _products_in_fp8(setting: Setting) -> Iterator[CheckRow]:
    """Products that Hopper computes in fp8, and gradients, against those of a CPU, which rounds
    alike; and that a token's product is the same whatever stands beside it."""
    if not computes_in_fp8(setting.device_type):
        found = "this torch computes none on this device: matrices are decoded"
        yield CheckRow("products in fp8", None, found)
        return
    devices = ("cpu", setting.device_type)
    x = torch.randn(64, 1024, dtype=torch.bfloat16)
    of_y = torch.randn(64, 512, dtype=torch.bfloat16)
    forms = product(get_args(Fp8Scaling), get_args(GradientPrecision))
    for scaling, gradient in forms:
        quantization = Quantization("fp8", 512, 1024, scaling, gradient, devices)
        stored = torch.empty(quantization.size, dtype=torch.uint8)
        quantization.write(stored, torch.randn(512, 1024))
        results: list[tuple[Tensor, Tensor]] = []
        for device in ("cpu", setting.device):
            own = x.to(device).requires_grad_()
            with torch.enable_grad():
                y = frozen_product(own, stored.to(device), quantization)
                (of_x,) = torch.autograd.grad(y, own, of_y.to(device))
            results.append((y.float().cpu(), of_x.float().cpu()))
        on_cpu, on_device = results
        error = _relative_error(on_device[0], on_cpu[0])
        of_gradient = _relative_error(on_device[1], on_cpu[1])
        yield CheckRow(
            f"a product in fp8, one scale a {scaling}, gradients in {gradient}: against a CPU's",
            max(error, of_gradient) < 1e-2,
            f"off by {error:.1e}, its gradient by {of_gradient:.1e}",
        )
        stored = stored.to(setting.device)
        alone = frozen_product(x.to(setting.device), stored, quantization)
        with_outlier = x.clone()
        with_outlier[0] *= 1e3
        beside = frozen_product(with_outlier.to(setting.device), stored, quantization)
        is_equal = torch.equal(alone[1:], beside[1:])
        yield CheckRow(
            f"a product in fp8, one scale a {scaling}, gradients in {gradient}: tokens beside an outlier",
            is_equal,
            "bit-equal" if is_equal else "differ",
        )


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """The size of the difference over that of `expected`."""
    return float((found - expected).norm() / expected.norm())


# --- Attention ------------------------------------------------------------------------------------


def literal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention as in a textbook, one head at a time; shapes as in `Attend`, ids: [B, S]."""
    visible = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    heads = []
    for head in range(query.shape[2]):
        of_key = head * key.shape[2] // query.shape[2]
        scores = query[:, :, head] @ key[:, :, of_key].mT / query.shape[-1] ** 0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        heads.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value[:, :, of_key])
    return torch.stack(heads, dim=2)


def check_attention(setting: Setting) -> Iterator[CheckRow]:
    """Every kernel that the device may take, forward and gradient, against a literal one in
    fp64."""
    length = 300 if setting.on_gpu else 48
    layouts = {
        "one document": (length,),
        "ragged": (5, length // 2, length - length // 2 - 5),
        "single": (1,) * length,
    }
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        grouped = (6, 2, 128)
        cases = (
            (4, 4, 64, None, None),
            (*grouped, None, None),
            (*grouped, 16, None),
            (*grouped, 16, 2.0),
        )
        for query_heads, key_heads, head_dim, window, softcap in cases:
            for layout, lengths in layouts.items():
                ids = torch.cat([torch.full((own,), at) for at, own in enumerate(lengths)]).expand(
                    2, -1
                )
                documents = Documents.of(ids).moved(lambda tensor: tensor.to(setting.device))
                chosen = partial(
                    attention_kernel, device=setting.device, dtype=dtype, head_dim=head_dim
                )
                kernels: list[Attend] = [chosen(documents, window=window, softcap=softcap)]
                if setting.on_gpu:
                    kernels.append(
                        MaskedAttention(
                            document_mask(documents.ids, dtype, window), softcap=softcap
                        )
                    )
                if layout == "one document" and window is None:
                    kernels += [CausalAttention(), chosen(None)]
                shapes = [
                    (2, length, heads, head_dim) for heads in (query_heads, key_heads, key_heads)
                ]
                heads = [
                    torch.randn(shape, device=setting.device).to(dtype).requires_grad_()
                    for shape in shapes
                ]
                weights = torch.randn(shapes[0], device=setting.device)
                exact = [own.detach().double().requires_grad_() for own in heads]
                query, key, value = exact
                literal = literal_attention(query, key, value, documents.ids, window, softcap)
                expected = _with_gradients(literal, weights, exact)
                for kernel in kernels:
                    found = _with_gradients(kernel(*heads), weights, heads)
                    error = max(
                        float((own - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
                        for own, wanted in zip(found, expected, strict=True)
                    )
                    name = getattr(kernel, "__name__", type(kernel).__name__)
                    what = f"{name}, {str(dtype).removeprefix('torch.')}, {query_heads}/{key_heads} heads of {head_dim}"
                    what += "" if window is None else f", window {window}"
                    what += "" if softcap is None else ", soft-capped"
                    yield CheckRow(
                        f"{what}, {layout}: results and gradients",
                        error < tolerance,
                        f"{error:.1e}",
                    )
    yield from _memory_of_rows(setting)


def _with_gradients(result: Tensor, weights: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


def _memory_of_rows(setting: Setting) -> Iterator[CheckRow]:
    """Rows of one document make no scores of all pairs of tokens, whatever the type and the size of
    the heads."""
    length = 8192 if setting.on_gpu else 64
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 128), (torch.bfloat16, 320)):
        shapes = [(1, length, heads, head_dim) for heads in (4, 1, 1)]
        heads = [
            torch.randn(shape, device=setting.device).to(dtype).requires_grad_() for shape in shapes
        ]
        peak, scores = PeakMemory(setting.device), 4 * length**2 * dtype.itemsize / 2**30
        attention_kernel(None, setting.device, dtype, head_dim)(*heads).sum().backward()
        what = f"{str(dtype).removeprefix('torch.')}, grouped heads of {head_dim}: rows without scores of all pairs"
        taken = peak.gib()
        found = (
            "seen on a GPU only" if taken is None else f"{taken:.3f} GiB; scores: {scores:.3f} GiB"
        )
        yield CheckRow(what, None if taken is None else taken < scores, found)
