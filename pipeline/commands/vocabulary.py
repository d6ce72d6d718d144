"""Adds tokens for a new language to a base's tokenizer.

    scale-cpt vocabulary --base examples/data/models/stories260K \\
        --corpus examples/data/ko/reviews.jsonl.zst \\
        --old-texts examples/data/en/stories.jsonl.zst --add 2000 --output runs/korean_vocabulary

The tokenizer then needs fewer tokens for the language. A text without a letter of the new language
has the same tokens as before; this is checked on all texts that are read. The folder that is
written holds the tokenizer, and the record that a run's setting `vocabulary` needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from pipeline.command_line import (
    add_overwrite_option,
    add_report_option,
    add_text_key_option,
    folder_or_hub,
    mebibytes,
    named_reports,
    positive,
)
from pipeline.data.tokenize.corpora import is_heldout
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.extension.merges import ROW_BITS
from pipeline.data.tokenizer.extension.vocabulary import (
    VOCABULARY,
    CutComparison,
    Cuts,
    learn_extension,
    write_extension,
)
from pipeline.files.folders import check_replaceable
from pipeline.log import get_logger

_HELDOUT_FRACTION = 0.02
"""The part of the new texts that is not learned from, and shown in the table."""
_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base",
        type=folder_or_hub,
        required=True,
        help="the base's folder, its name on the hub, or a tokenizer.json",
    )
    parser.add_argument(
        "--corpus",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts of the new language: files, patterns, hf://org/name",
    )
    parser.add_argument(
        "--old-texts",
        nargs="+",
        required=True,
        metavar="FILE",
        help="texts that the base knows: no new token has their letters",
    )
    parser.add_argument(
        "--add", type=positive, required=True, metavar="N", help="how many tokens are added at most"
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write")
    add_overwrite_option(parser)
    parser.add_argument(
        "--min-uses",
        type=positive,
        default=10,
        help="drop tokens that occur less often in the texts that are read (default: 10)",
    )
    parser.add_argument(
        "--max-mib",
        type=mebibytes,
        default="64",
        help="MiB read of the new and of the old texts; 12 MiB of Korean need 1 GiB of memory "
        "(default: 64)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed that draws the texts to read (default: 0)"
    )
    add_text_key_option(parser)
    add_report_option(parser)


def main(arguments: argparse.Namespace) -> None:
    check_replaceable(arguments.output, VOCABULARY, overwrite=arguments.overwrite)
    _logger.info("reading the texts, then learning at most %d tokens", arguments.add)
    read = {
        "text_key": arguments.text_key,
        "max_bytes": arguments.max_mib,
        "seed": arguments.seed,
    }
    learned: list[str] = []
    heldout: list[str] = []
    for text in texts(arguments.corpus, **read):
        # By the text's hash: tokens are judged on texts from which they were not learned, the same
        # ones in each call.
        if is_heldout(text, _HELDOUT_FRACTION):
            heldout.append(text)
        else:
            learned.append(text)
    old = list(texts(arguments.old_texts, **read))
    extension = learn_extension(
        arguments.base, learned, old, add=arguments.add, min_uses=arguments.min_uses
    )
    reports = named_reports(arguments.report_on)
    found: dict[str, Cuts] = {}

    def check(folder: Path) -> None:
        """Compares the tokenizers on all texts, before the folder is published."""
        comparison = CutComparison(extension, folder)
        found["new, held out"] = comparison.of(heldout)
        found["old"] = comparison.of(old)
        for name, file in reports.items():
            found[name] = comparison.of(texts([file], text_key=arguments.text_key))

    write_extension(extension, arguments.output, check, overwrite=arguments.overwrite)
    record = extension.record
    print(
        f"{arguments.output}: {record.kind}, {len(record.tokens)} new tokens "
        f"from id {record.base_rows} on"
    )
    print(
        f"learned from {record.learned_from:,} characters, seed {arguments.seed}; "
        "every new token holds one of"
    )
    print(f"  {_ranges(record.character_rows)}")
    _print_table(found)


def _print_table(found: Mapping[str, Cuts]) -> None:
    """Prints the tokens of each text before and after."""
    print(
        f"{'text':24} {'documents':>9} {'characters':>11} {'tokens/character':>23} "
        f"{'cut as before':>13}"
    )
    for name, cuts in found.items():
        if cuts.documents == 0:
            continue
        before = cuts.tokens_before / cuts.characters
        after = cuts.tokens_after / cuts.characters
        rates = f"{before:.4f} -> {after:.4f}"
        counts = f"{cuts.documents:9,} {cuts.characters:11,}"
        print(f"{name:24} {counts} {rates:>23} {cuts.cut_as_before:13,}")


def _ranges(rows: list[int]) -> str:
    """Rows of characters as ranges of code points."""
    starts = [row for row in rows if row - 1 not in rows]
    stops = [row + 1 for row in rows if row + 1 not in rows]
    ranges: list[str] = []
    for start, stop in zip(starts, stops, strict=True):
        first = start << ROW_BITS
        last = (stop << ROW_BITS) - 1
        ranges.append(f"U+{first:04X}-{last:04X}")
    return ", ".join(ranges)
