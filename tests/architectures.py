"""Prints the table of docs/architectures.md: every kind of base of `tests/bases.py`, compared with transformers.

python -m tests.architectures
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from pipeline.errors import LayoutError
from pipeline.model.base_folder import BaseFolder
from pipeline.model.from_hf import open_base
from pipeline.model.spec import DecoderSpec, check_base_fits
from pipeline.model.stock_model import why_not_stock
from pipeline.scale.plan import plan_expansion
from tests.bases import CONFIGS, reference, save_base
from tests.widened import scale_settings, some_tokens, unwidened, widened

LENGTHS = (1, 37, 128)
COLUMNS = ("base", "model_type", "features", "a logit is off by", "step 0", "tensor parallel", "`--format stock`")


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n")
    with TemporaryDirectory() as folder:
        for number, name in enumerate(CONFIGS):
            sys.stdout.write(row(name, open_base(save_base(name, Path(folder) / str(number)))) + "\n")


@torch.no_grad()
def row(name: str, base: BaseFolder) -> str:
    """A row: measured differences are those of fp32 logits, on random weights and texts of several lengths."""
    theirs, ours = reference(base.path), unwidened(base)
    model = widened(base, scale_settings("route", collaborative_modules="both"))
    off, exact = 0.0, True
    for length in LENGTHS:
        tokens = some_tokens(base.spec, 2, length)
        expected, found = theirs(tokens).logits, ours.logits(tokens)
        off, exact = max(off, float((found - expected).abs().max())), exact and torch.equal(model.logits(tokens), found)
    plan = plan_expansion(scale_settings("adapt", norm="base"), base.spec.widths, base.spec.num_layers)
    stock = why_not_stock(plan, base.spec, gated=False)
    cells = (
        name,
        f"`{base.spec.family}`",
        ", ".join(features(base.spec)),
        f"{off:.1e}",
        "exact" if exact else "differs",
        "yes" if fits(base.spec) else "no",
        "yes" if stock is None else f"no: {stock}",
    )
    return f"| {' | '.join(cells)} |"


def fits(spec: DecoderSpec) -> bool:
    """Whether the base can be split over two ranks."""
    try:
        check_base_fits(spec, 2)
    except LayoutError:
        return False
    return True


def features(spec: DecoderSpec) -> Iterator[str]:
    """What differs from a plain decoder with RMSNorms before attention and FFN."""
    if spec.norm == "layernorm":
        yield "LayerNorm"
    if spec.parallel_residual:
        yield "parallel residual"
    if spec.norm_placement != "before":
        yield {"after": "norms after", "both": "norms before and after"}[spec.norm_placement]
    if spec.gain_offset:
        yield "gains 1 + w"
    if spec.query_key_norm != "none":
        yield {"head": "norm of each query and key head", "all": "norm over all query heads"}[spec.query_key_norm]
    if spec.embedding_scale != 1.0:
        yield "scaled embedding"
    if spec.attention_softcap or spec.output_softcap:
        yield "soft-capped scores and logits"
    if spec.tie_word_embeddings:
        yield "tied"
    if windows := [kind.window for kind in spec.layers if kind.window]:
        yield f"window {windows[0]} in {len(windows)} of {spec.num_layers} layers"
    if without := [kind for kind in spec.layers if kind.rotary is None]:
        yield f"no position embedding in {len(without)} layers"
    rotary = {kind.rotary for kind in spec.layers if kind.rotary}
    if len(rotary) > 1:
        yield "two rotary embeddings"
    if any(one.context for one in rotary):
        yield "frequencies change beyond the context"
    if any(one.attention_factor != 1.0 for one in rotary):
        yield "attention factor"
    if any(2 * len(one.frequencies) < spec.head_dim for one in rotary):
        yield "part of each head rotated"
    if spec.head_dim * spec.widths.num_attention_heads != spec.widths.hidden_size:
        yield "head size of its own"


if __name__ == "__main__":
    main()
