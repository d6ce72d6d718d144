"""What a packed difference keeps of a fully fine-tuned run with a gate, on its held-out texts.

    python -m benchmarks.difference_quality runs/frontier/quick/fft_muon_difference.lr_0.018.seed_1

The table has the perplexity of each held-out corpus: by the base, by the trained model (`ungated`),
by both chosen by the gate without packing (`gated`), and by an export of each number of bits.
`stored_x` is what a model takes on disk, in sizes of the base, and `lost` the share of the learned
change that packing loses. The exports are made in a temporary folder. The samples are those of
validation.

`keys_of_the_base` is what it would cost to leave the closed beginning of a text unread by the
trained model when the text opens: there the trained model goes on with the base's keys and values
of that beginning. The export reads the beginning anew instead (`read_anew`). Both are perplexities
of the tokens from the first open one on, of the texts that open after their first token.
`closed_again` is the share of these tokens at which the base has to catch up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import (
    convert,
    latest_conversion,
    run_sources,
)
from pipeline.conversion.export_format import VERIFICATION
from pipeline.conversion.probe_texts import probe_maker
from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import load_heldout
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConversionError
from pipeline.extensions.gate.windows import Windows, as_windows
from pipeline.files.json_files import read_object
from pipeline.gating.folder import GATE_FOLDER, open_record
from pipeline.hf.folder_kinds import EXPORT
from pipeline.hf.load import load_hf_model
from pipeline.model.output import perplexity


def heldout_windows(config: RunConfig) -> dict[str, Windows]:
    """The samples of each held-out corpus that validation reads."""
    fingerprint = load_tokenizer(config.tokenizer).fingerprint
    found: dict[str, Windows] = {}
    for name, samples in load_heldout(config.data, tokenizer_fingerprint=fingerprint).items():
        count = config.validation.max_sequences
        found[name] = as_windows(list(islice(samples, count)), is_new=False)
    return found


@torch.no_grad()
def perplexities(model: Any, texts: Mapping[str, Windows]) -> dict[str, float]:
    """The perplexity of each corpus by an export in the format `difference`."""
    found: dict[str, float] = {}
    for name, windows in texts.items():
        nll = 0.0
        for group in windows.groups():
            # Positions that begin again are another document of the row.
            logits = model(group.tokens, position_ids=group.positions, use_cache=False).logits
            nll += float(losses(logits, group.targets).sum())
        found[name] = perplexity(nll / int((windows.targets != IGNORED).sum()))
    return found


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target in fp64, 0 where nothing is predicted.

    [B, S, V], [B, S] -> [B, S].
    """
    flat = F.cross_entropy(
        logits.double().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return flat.view(targets.shape)


@torch.no_grad()
def cost_of_base_keys(model: Any, windows: Windows) -> dict[str, float]:
    """Nats a token of open text by the trained model that reads each text from its start, and by
    the one that goes on with the base's keys and values of the closed beginning.

    Each row is taken as one document.
    """
    config = model.config.text_config
    reread = 0.0
    kept = 0.0
    tokens = 0
    closed_again = 0
    for row in range(len(windows)):
        text = windows.tokens[row : row + 1]
        targets = windows.targets[row : row + 1]
        states = model.base(text, output_hidden_states=True, use_cache=False).hidden_states
        opens = model.token_gate(states[model.config.gate_layer], None, None, None)
        # New tokens are open whatever the gate's score.
        by_id = model.token_gate.opens_id(text)
        if by_id is not None:
            opens = opens | by_id
        opens = opens[0, :, 0]
        if opens[0] or not opens.any():
            # Without a closed beginning, or without an open token, both ways are the same.
            continue
        first = int(opens.nonzero()[0])
        # As the export does: the beginning anew, by the trained model.
        whole = model.trained()(text, use_cache=False).logits[:, first:]
        # Both models have the same widths, so that one can go on with the other's keys.
        cache = DynamicCache(config=config)
        model.base(text[:, :first], past_key_values=cache, use_cache=True)
        going_on = model.trained()(text[:, first:], past_key_values=cache, use_cache=True).logits
        reread += float(losses(whole, targets[:, first:]).sum())
        kept += float(losses(going_on, targets[:, first:]).sum())
        closed_again += int((~opens[first:]).sum())
        tokens += int((targets[:, first:] != IGNORED).sum())
    if not tokens:
        # Every text is open from its first token, or closed to its end.
        return {"tokens": 0}
    return {
        "tokens": tokens,
        "closed_again": closed_again / tokens,
        "read_anew": perplexity(reread / tokens),
        "keys_of_the_base": perplexity(kept / tokens),
    }


def measure(config: RunConfig, bits: list[int], min_count: int) -> list[Row]:
    """A row for the run without packing, and for each number of bits.

    Raises:
        ConversionError: a difference loses more than its bits explain.
    """
    texts = heldout_windows(config)
    # The stage `gate` has measured these three on the same samples.
    record = open_record(config.folder / GATE_FOLDER)
    rows: list[Row] = []
    for kind in ("base", "ungated", "gated"):
        # Without packing the trained model is stored whole beside the base.
        row: Row = {"model": kind, "stored_x": 1.0 if kind == "base" else 2.0}
        for name, text in record.heldout.items():
            row[name] = getattr(text, f"{kind}_perplexity")
        rows.append(row)
    for count in bits:
        rows.append(packed_row(config, texts, count, min_count))
    return rows


def packed_row(config: RunConfig, texts: Mapping[str, Windows], bits: int, min_count: int) -> Row:
    """Exports the run with its difference in so many bits, and scores the export."""
    sources, keys = run_sources(config)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "difference"
        conversion = replace(
            latest_conversion(config),
            output=folder,
            format="difference",
            options={"bits": bits, "min_count": min_count},
        )
        convert(conversion, probe_maker(sources, keys))
        model = load_hf_model(folder)
        stored = read_object(folder / EXPORT.record, ConversionError)["difference"]
        verified = read_object(folder / VERIFICATION, ConversionError)
        row: Row = {"model": f"{bits} bits", "stored_x": stored["stored_x"]}
        row |= perplexities(model, texts)
        row["lost"] = verified["lost"]
        row["rows"] = stored["own_rows"]
        for name, windows in texts.items():
            for kind, value in cost_of_base_keys(model, windows).items():
                row[f"{name}.{kind}"] = value
    return row


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run", type=Path, help="a finished run with method fft and a gate: its folder or YAML")
    add("--bits", type=int, nargs="+", choices=(4, 8, 16), default=[4, 8, 16], help="to measure")
    add(
        "--min-count",
        type=command_line.non_negative,
        default=20,
        help="as of scale-cpt convert (default: 20)",
    )
    options = parser.parse_args()
    rows = measure(load_config(options.run), options.bits, options.min_count)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
