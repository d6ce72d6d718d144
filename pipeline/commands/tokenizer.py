"""Trains a SentencePiece tokenizer, or converts one, and compares tokenizers.

    scale-cpt tokenizer --input 'corpus/*.jsonl.zst' --output korean.json --vocab-size 8000 \\
        --compare examples/data/models/stories260K \\
        --report-on korean=examples/data/ko/reviews.heldout.jsonl.zst
    scale-cpt tokenizer --convert base/tokenizer.model --output base/tokenizer.json \\
        --report-on examples/data/ko/*.heldout.jsonl.zst

The tokenizer is BPE or Unigram, with byte fallback. The name of the output decides its format:
`.model` is SentencePiece's own, `.json` is a tokenizer.json of the same tokenizer. --convert writes
the tokenizer.json of a SentencePiece model that exists, and says how many of the texts to report on
have the same ids by both.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pipeline.command_line import (
    add_report_option,
    add_text_key_option,
    fraction,
    mebibytes,
    named_reports,
    positive,
)
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.encoders import agree
from pipeline.data.tokenizer.load import Tokenizer, batches, fertility, load_tokenizer
from pipeline.data.tokenizer.sentencepiece_model import (
    SUFFIX,
    ModelType,
    converted,
    read_model,
    train_model,
)
from pipeline.errors import ConfigError, DataError, OutputError
from pipeline.files.publishing import make_parent, published_file, write_text
from pipeline.files.reading import read_bytes
from pipeline.log import get_logger

_logger = get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="FILE",
        help="the texts to learn from: files, patterns, hf://org/name",
    )
    add_text_key_option(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the .model (SentencePiece) or tokenizer.json to write",
    )
    parser.add_argument(
        "--convert",
        type=Path,
        metavar="MODEL",
        help="write this SentencePiece model as a tokenizer.json",
    )
    parser.add_argument(
        "--model-type",
        choices=get_args(ModelType),
        default="bpe",
        help="how the tokenizer segments text (default: bpe)",
    )
    parser.add_argument(
        "--vocab-size", type=positive, default=32_000, help="tokens in all (default: 32000)"
    )
    parser.add_argument(
        "--character-coverage",
        type=fraction,
        default=0.9999,
        help="the part of the text's characters that get tokens; rarer characters become bytes "
        "(default: 0.9999)",
    )
    parser.add_argument(
        "--max-mib",
        type=mebibytes,
        default="256",
        help="MiB of text to learn from, equally much of each file (default: 256)",
    )
    parser.add_argument(
        "--compare",
        nargs="*",
        type=Path,
        default=[],
        metavar="TOKENIZER",
        help="other tokenizers for the table",
    )
    add_report_option(parser)


def main(arguments: argparse.Namespace) -> None:
    _check(arguments)
    output: Path = arguments.output
    make_parent(output)
    if arguments.convert is not None:
        _convert(arguments.convert, output)
    else:
        _train(arguments)
    written = load_tokenizer(output)
    print(f"{output}: {written.vocab_size} tokens")
    reports = named_reports(arguments.report_on)
    if arguments.convert is not None:
        _compare_ids(load_tokenizer(arguments.convert), written, reports, arguments.text_key)
    if reports:
        tokenizers = {output: written}
        for path in arguments.compare:
            tokenizers[path] = load_tokenizer(path)
        _print_table(tokenizers, reports, arguments.text_key)


def _check(arguments: argparse.Namespace) -> None:
    """Checks the options before any work.

    Raises:
        ConfigError: they do not fit together.
        OutputError: training would replace a file.
    """
    output: Path = arguments.output
    if output.suffix not in (SUFFIX, ".json"):
        raise ConfigError(
            f"--output {output}: expected a name in .model (SentencePiece) or .json "
            "(tokenizer.json)"
        )
    if (arguments.convert is None) == (not arguments.input):
        raise ConfigError(
            "give --input to train a tokenizer, or --convert for the tokenizer.json of a model"
        )
    if arguments.convert is not None and output.suffix != ".json":
        raise ConfigError(
            f"--output {output}: --convert writes a tokenizer.json; give a name in .json"
        )
    if arguments.convert is None and output.exists():
        raise OutputError(f"{output}: exists; remove it, or choose another --output")


def _print_table(
    tokenizers: Mapping[Path, Tokenizer], reports: Mapping[str, str], text_key: str
) -> None:
    """Prints how many tokens each tokenizer makes of each text."""
    print(f"{'tokenizer':40} {'text':12} {'tokens/character':>17} {'tokens/byte':>12}")
    for path, tokenizer in tokenizers.items():
        for name, file in reports.items():
            found = fertility(tokenizer, texts([file], text_key=text_key))
            rates = f"{found.tokens_per_character:17.4f} {found.tokens_per_byte:12.4f}"
            print(f"{str(path)[-40:]:40} {name:12} {rates}")


def _train(arguments: argparse.Namespace) -> None:
    """Learns a tokenizer from the input and writes it in the output's format."""
    output: Path = arguments.output
    _logger.info("reading the texts, then learning %d tokens", arguments.vocab_size)
    documents = texts(arguments.input, text_key=arguments.text_key, max_bytes=arguments.max_mib)
    content = train_model(
        documents,
        arguments.vocab_size,
        model_type=arguments.model_type,
        character_coverage=arguments.character_coverage,
    )
    if output.suffix == SUFFIX:
        with published_file(output) as file:
            file.write(content)
    else:
        tokenizer = converted(read_model(output, content))
        write_text(output, tokenizer.to_str(pretty=True))


def _convert(source: Path, output: Path) -> None:
    """Writes a SentencePiece model as a tokenizer.json; never replaces another tokenizer."""
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
        count = 0
        same = 0
        example = ""
        for batch in batches(texts([file], text_key=text_key)):
            for text in batch:
                count += 1
                if agree(model.reference, written.reference, [text]):
                    same += 1
                elif not example:
                    example = f"; others, such as {text[:60]!r}, differ"
        print(f"{name}: {same} of {count} texts have the ids of {model.path}{example}")
