"""What 16-bit and 8-bit weights change of an export's perplexity, and of its gate's decisions.

    python -m benchmarks.export_precision exported --text examples/data/ko/reviews.heldout.jsonl.zst

The export runs in transformers on windows of the text: in fp32, in bf16, and with the weights of
its linear maps rounded to 8 bits with a scale for each row (int8 weight-only; the output projection
and other modules stay as they are, as the library leaves them).

A row has the perplexity, and as `change` how far it is from that in fp32. `open` is the share of
tokens that the gate opens, and `opens_otherwise` that for which it decides otherwise than in fp32:
it computes in fp32, but reads the base's stream, which is rounded. Ids that are open by definition
are open in every type. Of several expansions beside each other there are perplexities alone.

The exit code is 1 where a perplexity changes by more than 1 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.results import Row, make_parser, print_rows, write_rows
from benchmarks.serve_check import STORIES_TEXT, scored_text
from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.scale_gate import ScaleGate
from pipeline.hf.served_tokenizer import served_tokenizer
from pipeline.model.output import perplexity

TOLERANCE = 0.01
"""By how much a perplexity may change."""
REFERENCE = "fp32"
WEIGHTS = (REFERENCE, "bf16", "int8")
LARGEST_INT8 = 127
OUTPUTS = ("lm_head", "embed_out")
"""What transformers calls the output projection, GPT-NeoX the latter. In a hosted export and in a
difference it is the base's: `base.lm_head`."""


class Scored(NamedTuple):
    """A text as a model scores it."""

    perplexity: float
    opens: Tensor
    """For each token, whether a gate opened it; empty without a gate."""


def with_weights(folder: Path, weights: str) -> nn.Module:
    """The export in `folder`, with weights of this precision."""
    # int8 changes the weights alone: they are multiplied in fp32.
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    model: nn.Module = load_hf_model(folder, dtype)
    if weights == "int8":
        round_to_int8(model)
    return model


@torch.no_grad()
def round_to_int8(model: nn.Module) -> None:
    """Rounds the weights of the linear maps to 8 bits, with a scale for each row; not those of the
    output projection.
    """
    rounded: set[Tensor] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module.weight in rounded:
            continue
        if name.rpartition(".")[2] in OUTPUTS:
            continue
        # Several expansions share the base's weights.
        rounded.add(module.weight)
        # Symmetric: without a zero point, as servers store weights. A row of zeros has scale 0, by
        # which nothing can be divided.
        largest = module.weight.abs().amax(dim=1, keepdim=True)
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / LARGEST_INT8
        module.weight.copy_((module.weight / scale).round() * scale)


@torch.no_grad()
def score(model: Any, ids: Tensor, context: int) -> Scored:
    """The perplexity of the tokens ids [N] in windows of `context`, and what the gate decided."""
    by_score: list[Tensor] = []

    def record(_: nn.Module, __: object, opens: Tensor) -> None:
        by_score.append(opens.flatten())

    # None in an export without a gate.
    gates = [module for module in model.modules() if isinstance(module, ScaleGate)]
    hooks = [gate.register_forward_hook(record) for gate in gates]
    decisions: list[Tensor] = []
    total = 0.0
    count = 0
    for window in ids.split(context):
        if len(window) < 2:
            # The last window of one token: nothing is predicted in it.
            break
        logits = model(window[None], use_cache=False).logits[0]
        # In fp64: a sum of thousands in the type of the logits would round more than the weights.
        total += float(F.cross_entropy(logits[:-1].double(), window[1:], reduction="sum"))
        count += len(window) - 1
        if by_score:
            opens = by_score.pop()
            by_id = gates[0].opens_id(window)
            if by_id is not None:
                opens = opens | by_id.flatten()
            decisions.append(opens)
    for hook in hooks:
        hook.remove()
    opens = torch.cat(decisions) if decisions else torch.empty(0, dtype=torch.bool)
    return Scored(perplexity(total / count), opens)


def measure(folder: Path, text: str, context: int) -> list[Row]:
    """A row for each precision of the weights.

    Raises:
        ConfigError: the text is shorter than a window.
    """
    ids = torch.tensor(served_tokenizer(folder)(text)["input_ids"])
    if len(ids) < context:
        raise ConfigError(f"--text: expected at least {context} tokens, found {len(ids)}")
    scored = {weights: score(with_weights(folder, weights), ids, context) for weights in WEIGHTS}
    # One model after another is loaded above, so that only one is in memory.
    reference = scored[REFERENCE]
    rows: list[Row] = []
    for weights, found in scored.items():
        row: Row = {"weights": weights, "tokens": len(ids), "perplexity": found.perplexity}
        row["change"] = found.perplexity / reference.perplexity - 1
        if len(found.opens):
            row["open"] = float(found.opens.float().mean())
            row["opens_otherwise"] = float((found.opens != reference.opens).float().mean())
        rows.append(row)
    return rows


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("export", type=Path, help="the folder of an export")
    parser.add_argument(
        "--text", default=str(STORIES_TEXT), help="documents to score (default: the demo's English)"
    )
    parser.add_argument(
        "--context", type=command_line.positive, default=128, help="tokens of a window; default 128"
    )
    options = parser.parse_args()
    rows = measure(options.export, scored_text(options.text), options.context)
    print_rows(rows)
    write_rows(options, rows)
    # Written so that a NaN is no agreement.
    changed = [row["weights"] for row in rows if not abs(row["change"]) <= TOLERANCE]
    for weights in changed:
        print(f"FAILED: {weights}: the perplexity changes by more than {TOLERANCE:.0%}")
    return 1 if changed else 0


if __name__ == "__main__":
    command_line.run(main)
