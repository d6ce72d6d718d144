"""Trains a tokenizer (BPE with byte fallback), and compares tokenizers on given texts.

    scale-cpt tokenizer --input 'corpus/*.jsonl.zst' --output korean.json --vocab-size 8000 \\
        --compare data/models/stories260K --report-on korean=data/ko/reviews.heldout.jsonl.zst
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.command_line import mebibytes, run_program
from pipeline.data.tokenizer import fertility, load_tokenizer
from pipeline.data.units import texts
from pipeline.files import write_text


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="as for scale-cpt tokenize")
    add("--text-key", default="text", help="the key or column that holds the document (default: text)")
    add("--output", type=Path, required=True, help="the tokenizer.json to write")
    add("--vocab-size", type=int, default=32_000, help="pieces in all (default: 32000)")
    add("--character-coverage", type=float, default=0.9999, help="of the text; rarer characters become bytes (0.9999)")
    add("--max-mib", type=mebibytes, default="256", help="learn from so much text, equally much of each file (256)")
    add("--compare", nargs="*", type=Path, default=[], metavar="TOKENIZER", help="other tokenizers for the table")
    add("--report-on", nargs="*", default=[], metavar="NAME=FILE", help="texts for the table")


def main(options: argparse.Namespace) -> None:
    from pipeline.studies.random_base import train_tokenizer  # --help does not wait for torch

    documents = texts(options.input, text_key=options.text_key, max_bytes=options.max_mib)
    trained = train_tokenizer(documents, options.vocab_size, character_coverage=options.character_coverage)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(options.output, trained.to_str(pretty=True))
    print(f"{options.output}: {trained.get_vocab_size()} pieces")
    reports = dict(report.split("=", 1) if "=" in report else (report, report) for report in options.report_on)
    if reports:
        print(f"{'tokenizer':40} {'text':12} {'tokens/character':>17} {'tokens/byte':>12}")
    for path in (options.output, *options.compare) if reports else ():
        tokenizer = load_tokenizer(path)
        for name, file in reports.items():
            found = fertility(tokenizer, texts([file], text_key=options.text_key))
            print(f"{str(path)[-40:]:40} {name:12} {found.tokens_per_character:17.4f} {found.tokens_per_byte:12.4f}")


if __name__ == "__main__":
    run_program(add_options, main, __doc__)
