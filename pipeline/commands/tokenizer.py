"""Trains a SentencePiece tokenizer, or converts one, and compares tokenizers.

    scale-cpt tokenizer --input 'corpus/*.jsonl.zst' --output korean.json --vocab-size 8000 \\
        --compare examples/data/models/stories260K --report-on korean=examples/data/ko/reviews.heldout.jsonl.zst
    scale-cpt tokenizer --convert base/tokenizer.model --output base/tokenizer.json \\
        --report-on examples/data/ko/*.heldout.jsonl.zst

The name of the output decides: `.model` is SentencePiece's own file, `.json` the same tokenizer as a tokenizer.json.
--convert writes the tokenizer.json of a model that exists, and counts the texts to report on whose ids are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pipeline.command_line import mebibytes
from pipeline.data.tokenize.units import texts
from pipeline.data.tokenizer.load import (
    Tokenizer,
    agree,
    batches,
    fertility,
    load_tokenizer,
)
from pipeline.data.tokenizer.sentencepiece_model import (
    SUFFIX,
    ModelType,
    converted,
    read_model,
    train_model,
)
from pipeline.errors import ConfigError, DataError, OutputError
from pipeline.files import published_file, read_bytes, write_text


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="the texts to learn from, as for scale-cpt tokenize",
    )
    add(
        "--text-key",
        default="text",
        help="the key or column that holds the document (default: text)",
    )
    add(
        "--output",
        type=Path,
        required=True,
        help="the .model (SentencePiece) or tokenizer.json to write",
    )
    add(
        "--convert",
        type=Path,
        metavar="MODEL",
        help="write this SentencePiece model as a tokenizer.json",
    )
    add(
        "--model-type",
        choices=get_args(ModelType),
        default="bpe",
        help="how the tokenizer cuts (default: bpe)",
    )
    add("--vocab-size", type=int, default=32_000, help="tokens in all (default: 32000)")
    add(
        "--character-coverage",
        type=float,
        default=0.9999,
        help="of the text; rarer characters become bytes (0.9999)",
    )
    add(
        "--max-mib",
        type=mebibytes,
        default="256",
        help="learn from so much text, equally much of each file (256)",
    )
    add(
        "--compare",
        nargs="*",
        type=Path,
        default=[],
        metavar="TOKENIZER",
        help="other tokenizers for the table",
    )
    add("--report-on", nargs="*", default=[], metavar="NAME=FILE", help="texts for the table")


def main(options: argparse.Namespace) -> None:
    output: Path = options.output
    if output.suffix not in (SUFFIX, ".json"):
        raise ConfigError(
            f"--output {output}: expected a name in .model (SentencePiece) or .json (tokenizer.json)"
        )
    if (options.convert is None) == (not options.input):
        raise ConfigError(
            "give --input to train a tokenizer, or --convert for the tokenizer.json of a model"
        )
    if options.convert is not None and output.suffix != ".json":
        raise ConfigError(
            f"--output {output}: --convert writes a tokenizer.json; give a name in .json"
        )
    reports = dict(
        report.split("=", 1) if "=" in report else (report, report) for report in options.report_on
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    if options.convert is not None:
        _convert(options.convert, output)
    else:
        _train(options)
    written = load_tokenizer(output)
    print(f"{output}: {written.vocab_size} tokens")
    if options.convert is not None:
        _compare_ids(load_tokenizer(options.convert), written, reports, options.text_key)
    if reports:
        print(f"{'tokenizer':40} {'text':12} {'tokens/character':>17} {'tokens/byte':>12}")
    for path in (output, *options.compare) if reports else ():
        tokenizer = written if path == output else load_tokenizer(path)
        for name, file in reports.items():
            found = fertility(tokenizer, texts([file], text_key=options.text_key))
            print(
                f"{str(path)[-40:]:40} {name:12} {found.tokens_per_character:17.4f} {found.tokens_per_byte:12.4f}"
            )


def _train(options: argparse.Namespace) -> None:
    documents = texts(options.input, text_key=options.text_key, max_bytes=options.max_mib)
    content = train_model(
        documents,
        options.vocab_size,
        model_type=options.model_type,
        character_coverage=options.character_coverage,
    )
    if options.output.suffix == SUFFIX:
        with published_file(options.output) as file:
            file.write(content)
    else:
        write_text(
            options.output, converted(read_model(options.output, content)).to_str(pretty=True)
        )


def _convert(source: Path, output: Path) -> None:
    if source.suffix != SUFFIX:
        raise DataError(f"--convert {source}: expected a model of SentencePiece, a file in .model")
    start = load_tokenizer(source).document_start
    model = read_model(source, read_bytes(source, DataError))
    content = converted(model, start).to_str(pretty=True)
    if output.exists() and output.read_text(encoding="utf-8") != content:
        raise OutputError(
            f"{output}: exists, and holds another tokenizer; remove it, or choose another --output"
        )
    write_text(output, content)


def _compare_ids(
    model: Tokenizer, written: Tokenizer, reports: Mapping[str, str], text_key: str
) -> None:
    """Prints how many texts have the same ids by both, and the beginning of one that has not."""
    for name, file in reports.items():
        count = same = 0
        example = ""
        for batch in batches(texts([file], text_key=text_key)):
            for text in batch:
                count += 1
                if agree(model.reference, written.reference, [text]):
                    same += 1
                elif not example:
                    example = f"; others, such as {text[:60]!r}, differ"
        print(f"{name}: {same} of {count} texts have the ids of {model.path}{example}")
