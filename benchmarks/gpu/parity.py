"""Parity with the base as transformers runs it, and its exact preservation, on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from benchmarks.gpu.fp8_rounding import check_rounding
from benchmarks.gpu.setting import (
    CheckRow,
    Setting,
    dtype_name,
    largest_error,
    small_methods,
    started,
)
from benchmarks.gpu_step.models import our_model, set_randomly
from benchmarks.results import BASES, STORIES
from pipeline.config.base import BasePrecision
from pipeline.config.method import FullFineTuning, Lora, Method
from pipeline.methods.build_model import quantize_base
from pipeline.model.attention import Documents
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.parallel.parameters import default_dtype

# By how much logits may differ from those of transformers in fp32. In fp32 only the order of sums
# differs; in bf16, which has 8 bits, every operation rounds otherwise.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5}
_LENGTH = 96


@torch.no_grad()
def check_parity(setting: Setting) -> Iterator[CheckRow]:
    """The base as transformers runs it; then that no method differs from it at step 0, nor a
    trained one in the base's stream."""
    from transformers import AutoModelForCausalLM

    # Drawn on the CPU, whose generator gives the same ids on every machine.
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (2, _LENGTH), generator=generator).to(setting.device)
    reference = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    theirs = reference.to(setting.device)(tokens).logits
    for dtype in _TOLERANCES:
        for precision in get_args(BasePrecision):
            yield from _check_base(setting, dtype, precision, tokens, theirs)
    yield from _preservation_at_size(setting)
    yield from check_rounding(setting)


def _check_base(
    setting: Setting,
    dtype: torch.dtype,
    precision: BasePrecision,
    tokens: Tensor,
    theirs: Tensor,
) -> Iterator[CheckRow]:
    """The base in one type and precision against `theirs`, and each variant of SCALE on it."""
    name = dtype_name(dtype) + _base_suffix(precision)
    # The base alone. Full fine-tuning trains it, so it cannot be quantised then: LoRA, whose
    # adapters start at zero, leaves it as it is.
    alone: Method = FullFineTuning(name="fft")
    if precision != "bf16":
        alone = Lora(name="lora", rank=4)
    base = started(alone, setting, dtype, base_precision=precision)
    base_logits = base.logits(tokens)
    difference = float((base_logits - theirs).abs().max())
    # What a quantised base is off by is the loss of its rounding, for which nothing is demanded.
    passed = difference < _TOLERANCES[dtype] if precision == "bf16" else None
    check = f"{name}: logits of the base, against transformers in fp32"
    yield CheckRow(check, passed, f"off by {difference:.2g}")

    packed = _packed_documents(tokens.shape[0], setting.device)
    for variant, method in small_methods().items():
        if precision != "bf16" and variant != "adapt":
            continue  # one variant shows what the form of the base changes
        model = started(method, setting, dtype, base_precision=precision)
        difference = float((model.logits(tokens) - base_logits).abs().max())
        check = f"{name}, {variant}: logits at step 0 less the base's"
        yield CheckRow(check, difference == 0, str(difference))
        # As if it were trained: at step 0 any check of the base's stream would pass.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        yield _preservation(f"{name}, {variant}", model, base, tokens)
        yield _preservation(f"{name}, {variant}, packed documents", model, base, tokens, packed)


def _packed_documents(rows: int, device: torch.device) -> Documents:
    """Documents of 40, 40 and 16 tokens in each row."""
    ids = torch.arange(_LENGTH).div(40, rounding_mode="floor")
    documents = Documents.of(ids.expand(rows, -1))
    return documents.moved(lambda tensor: tensor.to(device))


def _preservation(
    name: str,
    model: CausalDecoder,
    base: CausalDecoder,
    tokens: Tensor,
    documents: Documents | None = None,
) -> CheckRow:
    """Whether a trained model keeps the base's stream and logits, bit for bit."""
    batch = (tokens, None, documents)
    expected_x = base.hidden_states(*batch).x
    expected_logits = base.logits(*batch)
    x = model.hidden_states(*batch, path="preserved").x
    logits = model.logits(*batch, path="base")
    exact = torch.equal(x, expected_x) and torch.equal(logits, expected_logits)
    # Not vacuous: what was added must change the model's own logits.
    moved = float((model.logits(*batch) - expected_logits).abs().max())

    found = "bit-equal"
    if not exact:
        off_x = float((x - expected_x).abs().max())
        off_logits = float((logits - expected_logits).abs().max())
        found = f"off by {largest_error([off_x, off_logits]):.2g}"
    return CheckRow(
        f"{name}: the base's stream and logits in a trained model",
        exact and moved > 0,
        f"{found} (what was added moves the logits by {moved:.2g})",
    )


def _preservation_at_size(setting: Setting) -> Iterator[CheckRow]:
    """The same at the sizes of a real base, where other matrix kernels run."""
    base_name = "llama-3.2-1b" if setting.on_gpu else "llama-1m"
    spec = read_spec(BASES / f"{base_name}.json")
    length = 2048 if setting.on_gpu else 64
    tokens = torch.randint(spec.vocab_size, (1, length), device=setting.device)
    for dtype in _TOLERANCES:
        for precision in get_args(BasePrecision):
            with default_dtype(dtype), setting.device:
                model = our_model("adapt", spec, 3, precision)
                base = Decoder(spec).requires_grad_(False)
            if precision != "bf16":
                quantize_base(base, precision)
            # Random weights need no download, and the added ones are then as if they were trained.
            for parameter in model.parameters():
                set_randomly(parameter)
            # The base's weights have the same names in the widened model.
            own = dict(model.named_parameters())
            for name, parameter in base.named_parameters():
                parameter.copy_(own[name])
            case = f"{dtype_name(dtype)}, adapt of {base_name}{_base_suffix(precision)}"
            yield _preservation(case, model, base, tokens)


def _base_suffix(precision: BasePrecision) -> str:
    """How the name of a case says that the base is quantised."""
    return "" if precision == "bf16" else f", base in {precision}"
