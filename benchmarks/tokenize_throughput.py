"""How fast text becomes tokens on disk: this project compared with Megatron-LM's scripts and
`datasets.map`.

    python -m benchmarks.tokenize_throughput --megatron PATH --json benchmarks/out/tokenize.json

Every contender is a whole process that reads the same text with the same tokenizer and number of
workers: plain JSONL, and this project also JSONL.zst and Parquet. `seconds` is the process from
start to end, `cpu_seconds` the processor time of all its processes, `peak_mib` the memory of the
largest. The columns with `per_megabyte` are of this project past its start, which is what it takes
for a file of one document. The contenders take turns, and the best of several rounds counts; on a
busy machine compare the processor times. Megatron-LM's scripts run from a checkout that you name;
none of it is part of this project.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.results import ROOT, Row, in_turns, make_parser, print_rows, write_rows
from pipeline.data.tokenize.documents import texts
from pipeline.files.json_files import write_json

DATA = ROOT / "examples" / "data"
_START = ".start.jsonl"
_OUR_START = "ours, start"
_ROWS = 4096
"""of a group of rows in Parquet"""
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
rows.map(encode, batched=True, num_proc=int(workers), remove_columns=rows.column_names).save_to_disk(output)
"""

# Adopts orphaned processes of the command, so that the processor time of all its descendants is
# counted.
_WITH_USAGE = """
import ctypes, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
code = subprocess.run(sys.argv[1:]).returncode
try:
    while True: os.wait()
except ChildProcessError: pass
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print("\\n", usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
sys.exit(code)
"""


class Usage(NamedTuple):
    """What a command and all its processes took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float


def main() -> None:
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
        help="MiB of text, of which what exceeds the files joins halves of them (default: the files)",
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
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tokenize-", dir=options.scratch) as scratch:
        folder = Path(scratch)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        shutil.copy(DATA / "tokenizers" / "20B_tokenizer.json", tokenizer / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        write_json(tokenizer / "tokenizer_config.json", settings)
        for language, inputs in (("english", options.english), ("korean", options.korean)):
            documents = list(texts(list(map(str, inputs))))
            source = folder / f"{language}.jsonl"
            _write_text(source, _as_many_as(documents, round(options.mib * 2**20)))
            contenders = _contenders(options, source, tokenizer, folder / "out")
            rows += _compare(contenders, language, source, folder / "out", options.rounds)
    print_rows(rows, [*rows[0], "ms_per_megabyte", "cpu_ms_per_megabyte"])
    write_rows(options, rows, cores=os.cpu_count())


def _as_many_as(documents: list[str], size: int) -> list[str]:
    """The documents, and halves of two of them joined until there are `size` bytes, so that all
    differ."""
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
        named = ["--tokenizer", str(tokenizer), "--output", str(output), "--workers", workers]
        return [*OURS, "--input", str(source.with_suffix(suffix)), *named]

    found = {_OUR_START: ours(_START)}
    for suffix in (".jsonl", ".jsonl.zst", ".parquet"):
        found[f"ours, gigatoken, {suffix}"] = ours(suffix)
    if options.ours:
        return found
    found["ours, tokenizers, .jsonl"] = [*ours(".jsonl"), "--reference-only"]
    if options.megatron:
        named = [
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(tokenizer),
            "--append-eod",
        ]
        scripts = {
            "preprocess_data_fast.py": ["--use-gigatoken"],
            "preprocess_data.py": ["--workers", workers],
        }
        for script, own in scripts.items():
            program = [sys.executable, str(options.megatron / "tools" / script)]
            found[f"Megatron-LM, {script}"] = [
                *program, "--input", str(source), "--output-prefix", str(output), *named, *own,
            ]  # fmt: skip
    found["datasets.map"] = [
        sys.executable,
        "-c",
        DATASETS_MAP,
        str(source),
        str(tokenizer),
        str(output),
        workers,
    ]
    return found


def _compare(
    contenders: dict[str, list[str]], language: str, source: Path, output: Path, rounds: int
) -> list[Row]:
    """The best of `rounds` runs of each, on the text of a language."""

    def run(command: list[str]) -> Usage:
        for path in output.parent.glob(output.name + "*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return usage_of(command)

    runs = in_turns({name: partial(run, own) for name, own in contenders.items()}, rounds)
    start = best_of(runs[_OUR_START])
    megabytes = source.stat().st_size / 1e6
    rows: list[Row] = []
    for name, done in runs.items():
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


def best_of(runs: Sequence[Usage]) -> Usage:
    """The least of each figure."""
    return Usage(*map(min, zip(*runs, strict=True)))


def usage_of(command: Sequence[str]) -> Usage:
    """Runs a command, which must succeed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_OFFLINE": "1",
    }
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _WITH_USAGE, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        cwd=ROOT,
    )
    elapsed = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    cpu_seconds, peak_mib = map(float, done.stdout.split()[-2:])
    return Usage(elapsed, cpu_seconds, peak_mib)


if __name__ == "__main__":
    main()
