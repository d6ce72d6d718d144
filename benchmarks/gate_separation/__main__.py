"""How well gates tell texts apart that look alike, by layer and by what they read.

    python -m benchmarks.gate_separation                        # after make frontier QUICK=1
    python -m benchmarks.gate_separation --base BASE --pair new.jsonl old.jsonl --own-text 16000

It needs a base and no training. For each pair of texts, new and old, a gate is fitted before each
of `--layers` on each kind of features; with `--own-text` also against what the base writes instead
of the old text. A row says what the gate does to documents that it was not fitted on. `auc` is the
probability that it scores a new token above an old one: 0.5 is chance. `new_open` and `old_open`
are the shares of tokens that it opens: 1 and 0 are wanted, and `--max-open-fraction` is what the
threshold allows of the old text. `…_at_even_odds` are these shares at a threshold of 0, where a
token is as likely new as old. docs/gate.md has the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gate_separation.separation import Separation
from benchmarks.gate_separation.texts import Kind, kind_of
from benchmarks.results import DATA, ROOT, Row, make_parser, print_rows, write_rows
from pipeline import command_line, log
from pipeline.command_line import positive
from pipeline.errors import ConfigError, DataError
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base

NEW = "ko/reviews"
OLD = "en/gutenberg"
# Languages apart, which every gate should tell; then kinds of text within one language.
PAIRS = [
    (NEW, OLD),
    ("ko/law", NEW),
    ("ko/book_reviews", NEW),
    ("en/stories", OLD),
    ("en/factbook", OLD),
]
"""New and old text, as files of the folder of texts, without their endings.

Pairs with a file that is missing are left out."""
logger = log.get_logger(__name__)


def main() -> None:
    options = parse_options()
    base = open_base(options.base)
    layers = chosen_layers(options.layers, base.spec.num_layers)
    pairs = options.pair or PAIRS
    kinds = read_kinds(pairs, options)
    decoder = Decoder(base.spec).eval()
    load_base(decoder, base)
    separation = Separation(decoder, options)
    rows: list[Row] = []
    for pair in pairs:
        if set(pair) <= kinds.keys():
            rows += separation.rows(pair, kinds, layers)
    if not rows:
        raise DataError(
            f"{options.data}: expected the files of a pair, found none; give --data or --pair"
        )
    print_rows(rows)
    write_rows(options, rows)


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__, "python -m benchmarks.gate_separation")
    add = parser.add_argument
    add(
        "--base",
        type=Path,
        default=ROOT / "runs/frontier/quick/pretrain/hf",
        help="a Hugging Face folder",
    )
    add(
        "--data",
        type=Path,
        default=DATA,
        help="the folder of the texts (default: examples/data)",
    )
    add(
        "--pair",
        nargs=2,
        action="append",
        metavar=("NEW", "OLD"),
        help="files, instead of the default pairs",
    )
    add(
        "--layers",
        nargs="+",
        type=int,
        help="before which the stream is read (default: a quarter, half, after all)",
    )
    add(
        "--own-text",
        type=positive,
        metavar="TOKENS",
        help="also fit against so much text that the base writes",
    )
    add(
        "--tokens",
        type=positive,
        default=20_000,
        help="of each kind and part, at most (default: 20,000)",
    )
    add("--sequence-length", type=positive, default=128, help="tokens in a window (default: 128)")
    add("--max-open-fraction", type=float, default=0.001, help="of the old text (default: 0.001)")
    add("--seed", type=int, default=0, help="of the texts' order and the own text (default: 0)")
    return parser.parse_args()


def chosen_layers(asked: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers of --layers, or the default ones.

    Raises:
        ConfigError: the base has no such layer.
    """
    if not asked:
        # A set: of a base with few layers two of these may be the same.
        return sorted({num_layers // 4, num_layers // 2, num_layers})
    for layer in asked:
        if not 0 <= layer <= num_layers:
            raise ConfigError(
                f"--layers: expected 0 to {num_layers} (after the last), found {layer}"
            )
    return list(asked)


def read_kinds(pairs: Sequence[Sequence[str]], options: argparse.Namespace) -> dict[str, Kind]:
    """The texts of the pairs by their names; those that are missing are left out."""
    kinds: dict[str, Kind] = {}
    missing: set[Path] = set()
    for pair in pairs:
        for name in pair:
            # A file of --pair has an ending; a default one is below --data.
            file = Path(name) if Path(name).suffix else options.data / f"{name}.jsonl.zst"
            # A kind may be in several pairs.
            if name in kinds or file in missing:
                continue
            if file.exists():
                kinds[name] = kind_of(file, options.seed)
            else:
                missing.add(file)
                logger.info("%s: no such file; its rows are left out", file)
    return kinds


if __name__ == "__main__":
    command_line.run(main)
