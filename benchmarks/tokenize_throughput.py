"""How fast text becomes tokens on disk: this project beside Megatron-LM and `datasets.map`.

    python -m benchmarks.tokenize_throughput --megatron PATH --json benchmarks/out/tokenize.json

Every contender is a whole process that reads the same text with the same tokenizer and number of
workers: plain JSONL, and this project also JSONL.zst and Parquet. Megatron-LM's scripts run from a
checkout that you name; none of it is part of this project.

A row has what a contender took: `seconds` from the process's start to its end, `cpu_seconds` the
processor time of all its processes, `peak_mib` the memory of the largest. The row `ours, start` is
this project on one document: what it takes before it tokenizes. The columns with `per_megabyte` are
past that start. The contenders take turns, and the best of several rounds counts; on a busy machine
compare the processor times.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.process_usage import Usage, best_of, usage_of
from benchmarks.results import DATA, Row, in_turns, make_parser, print_rows, write_rows
from pipeline.data.tokenize.documents import texts
from pipeline.files.json_files import write_json

_START = ".start.jsonl"
_OUR_START = "ours, start"
_ROWS = 4096
"""Rows of a group in Parquet: small enough that a file has units of work for all workers."""
OURS = [sys.executable, "-m", "pipeline", "tokenize"]
# `datasets.map` as its documentation shows it: batched, over processes, the columns replaced by
# ids, saved as Arrow.
DATASETS_MAP = """
import sys
import datasets, transformers
source, tokenizer, output, workers = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=output + ".cache")
encode = lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]}
rows.map(
    encode, batched=True, num_proc=int(workers), remove_columns=rows.column_names
).save_to_disk(output)
"""


def main() -> None:
    options = parse_options()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tokenize-", dir=options.scratch) as scratch:
        folder = Path(scratch)
        tokenizer = _make_tokenizer(folder)
        output = folder / "out"
        # Apart: a megabyte of Korean is another number of words and of tokens than one of English.
        for language, inputs in (("english", options.english), ("korean", options.korean)):
            documents = list(texts([str(file) for file in inputs]))
            source = folder / f"{language}.jsonl"
            _write_text(source, _as_many_as(documents, round(options.mib * 2**20)))
            contenders = _contenders(options, source, tokenizer, output)
            rows += _compare(contenders, language, source, output, options.rounds)
    # The first row is that of the start, which has no columns past the start.
    print_rows(rows, [*rows[0], "ms_per_megabyte", "cpu_ms_per_megabyte"])
    write_rows(options, rows, cores=os.cpu_count())


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    korean = [DATA / "ko" / name for name in ("reviews.jsonl.zst", "law.jsonl.zst")]
    add(
        "--english",
        nargs="+",
        default=[DATA / "en" / "gutenberg.jsonl.zst"],
        metavar="FILE",
        help="English text",
    )
    add("--korean", nargs="+", default=korean, metavar="FILE", help="Korean text")
    add(
        "--mib",
        type=float,
        default=0,
        help="MiB of text; what the files lack is joined of halves of their documents "
        "(default: the files)",
    )
    add(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes of each contender",
    )
    add(
        "--rounds", type=int, default=3, help="runs of each contender; the best counts (default: 3)"
    )
    add("--megatron", type=Path, help="a checkout of Megatron-LM")
    add("--ours", action="store_true", help="only this project, with gigatoken")
    add("--scratch", type=Path, help="folder for temporary texts and outputs")
    return parser.parse_args()


def _make_tokenizer(folder: Path) -> Path:
    """A Hugging Face folder of GPT-NeoX's tokenizer, which every contender reads."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(DATA / "tokenizers" / "20B_tokenizer.json", tokenizer / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    write_json(tokenizer / "tokenizer_config.json", settings)
    return tokenizer


def _as_many_as(documents: list[str], size: int) -> list[str]:
    """The documents, and new ones until there are `size` bytes.

    A new one is made of halves of two others, so that all differ: tokenizers cache what they met.
    """
    made = list(documents)
    total = sum(len(text.encode()) for text in made)
    draw = random.Random(0)
    while total < size:
        first, second = draw.choices(documents, k=2)
        joined = first[: len(first) // 2] + second[len(second) // 2 :]
        made.append(joined)
        total += len(joined.encode())
    return made


def _write_text(source: Path, documents: list[str]) -> None:
    """Writes the documents as `source`, which is JSONL, and beside it as JSONL.zst and Parquet.

    A file `<name>.start.jsonl` has the first document alone.
    """
    lines = [orjson.dumps({"text": text}) + b"\n" for text in documents]
    content = b"".join(lines)
    source.write_bytes(content)
    source.with_suffix(_START).write_bytes(lines[0])
    source.with_suffix(".jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    table = pa.table({"text": documents})
    pq.write_table(table, source.with_suffix(".parquet"), row_group_size=_ROWS, compression="zstd")


def _contenders(
    options: argparse.Namespace, source: Path, tokenizer: Path, output: Path
) -> dict[str, list[str]]:
    """The commands to compare, by their names."""
    workers = str(options.workers)

    def ours(suffix: str) -> list[str]:
        command = [*OURS, "--input", str(source.with_suffix(suffix)), "--output", str(output)]
        return [*command, "--tokenizer", str(tokenizer), "--workers", workers]

    # What starting takes is taken off below: the rates hold for any amount of text.
    contenders = {_OUR_START: ours(_START)}
    for suffix in (".jsonl", ".jsonl.zst", ".parquet"):
        contenders[f"ours, gigatoken, {suffix}"] = ours(suffix)
    if options.ours:
        return contenders
    # The tokenizers library, which the others use, in place of gigatoken.
    contenders["ours, tokenizers, .jsonl"] = [*ours(".jsonl"), "--reference-only"]
    if options.megatron:
        contenders |= _megatron_scripts(options.megatron, source, tokenizer, output, workers)
    program = [sys.executable, "-c", DATASETS_MAP]
    contenders["datasets.map"] = [*program, str(source), str(tokenizer), str(output), workers]
    return contenders


def _megatron_scripts(
    checkout: Path, source: Path, tokenizer: Path, output: Path, workers: str
) -> dict[str, list[str]]:
    """The commands of Megatron-LM's two scripts; only the older one takes a number of workers."""
    commands: dict[str, list[str]] = {}
    for script, own in (
        ("preprocess_data_fast.py", ["--use-gigatoken"]),
        ("preprocess_data.py", ["--workers", workers]),
    ):
        command = [sys.executable, str(checkout / "tools" / script)]
        command += ["--input", str(source), "--output-prefix", str(output)]
        command += ["--tokenizer-type", "HuggingFaceTokenizer"]
        # A token after each document, as this project writes one.
        command += ["--tokenizer-model", str(tokenizer), "--append-eod", *own]
        commands[f"Megatron-LM, {script}"] = command
    return commands


def _compare(
    contenders: dict[str, list[str]], language: str, source: Path, output: Path, rounds: int
) -> list[Row]:
    """The best of `rounds` runs of each, on the text of a language."""

    def run(command: list[str]) -> Usage:
        # A finished output would be recognised, and nothing done.
        for path in output.parent.glob(output.name + "*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        return usage_of(command)

    runs = in_turns({name: partial(run, own) for name, own in contenders.items()}, rounds)
    start = best_of(runs[_OUR_START])
    megabytes = source.stat().st_size / 1e6
    rows: list[Row] = []
    for name, done in runs.items():
        # The least of each figure: other load only ever adds.
        best = best_of(done)
        row: Row = {"contender": f"{language}, {name}", "megabytes": megabytes}
        if name == _OUR_START:
            row["megabytes"] = source.with_suffix(_START).stat().st_size / 1e6
        row.update(best._asdict())
        if name.startswith("ours, gigatoken"):
            row["ms_per_megabyte"] = (best.seconds - start.seconds) * 1000 / megabytes
            cpu_seconds = best.cpu_seconds - start.cpu_seconds
            row["cpu_ms_per_megabyte"] = cpu_seconds * 1000 / megabytes
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
