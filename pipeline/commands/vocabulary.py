"""Adds tokens for a new language to a base's tokenizer.

    scale-cpt vocabulary --base examples/data/models/stories260K --corpus examples/data/ko/reviews.jsonl.zst \\
        --old-texts examples/data/en/stories.jsonl.zst --add 2000 --output runs/korean_vocabulary

A text without a letter of the new language is cut exactly as before; this is checked on all texts that are read. The
folder that is written holds the tokenizer, and the record that a run's setting `vocabulary` needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.command_line import (
    add_overwrite_option,
    folder_or_hub,
    mebibytes,
    positive,
)
from pipeline.data.tokenize.corpora import is_heldout
from pipeline.data.tokenize.units import texts
from pipeline.data.tokenizer.extension.merges import ROW_BITS
from pipeline.data.tokenizer.extension.vocabulary import (
    VOCABULARY,
    Comparison,
    Cuts,
    learn_extension,
    write_extension,
)
from pipeline.files import check_replaceable

_HELDOUT_FRACTION = 0.02


def main(options: argparse.Namespace) -> None:
    check_replaceable(options.output, VOCABULARY, overwrite=options.overwrite)
    read = {"text_key": options.text_key, "max_bytes": options.max_mib, "seed": options.seed}
    learned: list[str] = []
    heldout: list[str] = []
    for text in texts(options.corpus, **read):
        (heldout if is_heldout(text, _HELDOUT_FRACTION) else learned).append(text)
    old = list(texts(options.old_texts, **read))
    extension = learn_extension(
        options.base, learned, old, add=options.add, min_uses=options.min_uses
    )
    reports = dict(
        report.split("=", 1) if "=" in report else (report, report) for report in options.report_on
    )
    found: dict[str, Cuts] = {}

    def check(folder: Path) -> None:
        comparison = Comparison(extension, folder)
        found["new, held out"] = comparison.of(heldout)
        found["old"] = comparison.of(old)
        for name, file in reports.items():
            found[name] = comparison.of(texts([file], text_key=options.text_key))

    write_extension(extension, options.output, check, overwrite=options.overwrite)
    record = extension.record
    print(
        f"{options.output}: {record.kind}, {len(record.tokens)} new tokens from id {record.base_rows} on"
    )
    print(
        f"learned from {record.learned_from:,} characters, seed {options.seed}; every new token holds one of"
    )
    print(f"  {_ranges(record.character_rows)}")
    print(
        f"{'text':24} {'documents':>9} {'characters':>11} {'tokens/character':>23} {'cut as before':>13}"
    )
    for name, cuts in found.items():
        if cuts.documents:
            rates = f"{cuts.tokens_before / cuts.characters:.4f} -> {cuts.tokens_after / cuts.characters:.4f}"
            print(
                f"{name:24} {cuts.documents:9,} {cuts.characters:11,} {rates:>23} {cuts.cut_as_before:13,}"
            )


def _ranges(rows: list[int]) -> str:
    """Rows of characters as ranges of code points."""
    starts = [row for row in rows if row - 1 not in rows]
    stops = [row + 1 for row in rows if row + 1 not in rows]
    ranges = zip(starts, stops, strict=True)
    return ", ".join(
        f"U+{first << ROW_BITS:04X}-{(stop << ROW_BITS) - 1:04X}" for first, stop in ranges
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--base",
        type=folder_or_hub,
        required=True,
        help="a base's folder, hub name, or tokenizer.json",
    )
    add(
        "--corpus",
        nargs="+",
        required=True,
        metavar="FILE",
        help="new texts, as for scale-cpt tokenize",
    )
    add(
        "--old-texts",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts that the base knows: no new token has their letters",
    )
    add("--add", type=positive, required=True, metavar="N", help="new tokens, at most")
    add("--output", type=Path, required=True, help="the folder to write")
    add_overwrite_option(parser)
    add(
        "--min-uses",
        type=positive,
        default=10,
        help="drop tokens that occur less often in the sample (default: 10)",
    )
    add(
        "--max-mib",
        type=mebibytes,
        default="64",
        help="read so much of both texts (64); 12 MiB of Korean need 1 GiB",
    )
    add("--seed", type=int, default=0, help="of that sample (default: 0)")
    add(
        "--text-key",
        default="text",
        help="the key or column that holds the document (default: text)",
    )
    add("--report-on", nargs="*", default=[], metavar="NAME=FILE", help="more texts for the table")
