"""How fast JSONL becomes tokens on disk: this project compared with Megatron-LM's scripts and `datasets.map`.

    python benchmarks/tokenize_throughput.py --megatron PATH --json benchmarks/out/tokenize.json

Every contender is a whole process that reads the same file with the same tokenizer and number of workers. `seconds` is
the process from start to end, `cpu_seconds` the processor time of all its processes, `peak_mib` the memory of the
largest. The contenders take turns, and the best of several rounds counts; on a busy machine compare the processor
times. Megatron-LM's scripts run from a checkout that you name; none of it is part of this project.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.data.tokenizer_training import texts
from pipeline.evaluation.table import table
from pipeline.files import write_json

PROJECT = Path(__file__).resolve().parents[1]
DATA = PROJECT / "data"
OURS = [sys.executable, str(PROJECT / "tools" / "preprocess_data.py")]

# `datasets.map` as its documentation shows it: batched, over processes, the columns replaced by ids, saved as Arrow.
DATASETS_MAP = """
import sys
if "--help" in sys.argv: import datasets, transformers; sys.exit()
import datasets, transformers
source, tokenizer, output, workers = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=output + ".cache")
encode = lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]}
rows.map(encode, batched=True, num_proc=int(workers), remove_columns=rows.column_names).save_to_disk(output)
"""


# Adopts orphaned processes of the command, so that the processor time of all its descendants is counted.
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


def main() -> None:
    options = _options()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tokenize-", dir=options.scratch) as scratch:
        folder = Path(scratch)
        tokenizer = _hugging_face_folder(options.tokenizer, folder / "tokenizer")
        for language, inputs in (("english", options.english), ("korean", options.korean)):
            source = _jsonl(inputs, folder / f"{language}.jsonl", options.mib)
            contenders = _contenders(options, source, tokenizer, folder / "out")
            rows += _compare(contenders, language, source, folder / "out", options.rounds)
    header = ["text, contender", "MB", "seconds", "MB/s", "processor s", "peak MiB"]
    names = ("megabytes", "seconds", "megabytes_per_second", "cpu_seconds", "peak_mib")
    lines = [[f"{row['text']}, {row['contender']}", *(f"{row[name]:.1f}" for name in names)] for row in rows]
    print(table(header, lines))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"workers": options.workers, "cores": os.cpu_count(), "rounds": options.rounds}
        write_json(options.json, {**about, "results": rows})


def _contenders(options: argparse.Namespace, source: Path, tokenizer: Path, output: Path) -> dict[str, list[str]]:
    workers = str(options.workers)
    ours = [*OURS, "--input", str(source), "--tokenizer", str(tokenizer), "--output", str(output), "--workers", workers]
    found = {"ours, gigatoken": ours}
    if options.ours:
        return found
    found["ours, tokenizers"] = [*ours, "--reference-only"]
    if options.megatron:
        named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer), "--append-eod"]
        paths = ["--input", str(source), "--output-prefix", str(output), *named]
        for script, own in (
            ("preprocess_data_fast.py", ["--use-gigatoken"]),
            ("preprocess_data.py", ["--workers", workers]),
        ):
            program = str(options.megatron / "tools" / script)
            found[f"Megatron-LM, {script}"] = [sys.executable, program, *paths, *own]
    found["datasets.map"] = [sys.executable, "-c", DATASETS_MAP, str(source), str(tokenizer), str(output), workers]
    return found


def _compare(
    contenders: dict[str, list[str]], language: str, source: Path, output: Path, rounds: int
) -> list[dict[str, Any]]:
    """The best of `rounds` runs of each."""
    runs: dict[str, list[_Run]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, command in contenders.items():
            for path in output.parent.glob(output.name + "*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            runs[name].append(_run(command))
    megabytes = source.stat().st_size / 1e6
    rows = []
    for name, done in runs.items():
        best = {figure: min(getattr(run, figure) for run in done) for figure in _Run._fields}
        speed = megabytes / best["seconds"]
        rows.append(
            {"contender": name, "text": language, "megabytes": megabytes, "megabytes_per_second": speed, **best}
        )
    return rows


class _Run(NamedTuple):
    seconds: float
    cpu_seconds: float
    peak_mib: float


def _run(command: Sequence[str]) -> _Run:
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as output_file:
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_USAGE, *command],
            stdout=output_file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=PROJECT,
        )
        process.wait()
        elapsed = time.perf_counter() - began
        output_file.seek(0)
        output = output_file.read().decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{output[-3000:]}")
    cpu_seconds, peak_mib = map(float, output.split()[-2:])
    return _Run(elapsed, cpu_seconds, peak_mib)


def _jsonl(inputs: Sequence[str], path: Path, mib: float) -> Path:
    """All documents of the inputs as JSONL, repeated until there are `mib` MiB (0: once)."""
    lines = [json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts(inputs)]
    once = b"".join(lines)
    with path.open("wb") as file:
        file.write(once)
        for _ in range(round(mib * 2**20 / len(once)) - 1):
            file.write(once)
    return path


def _hugging_face_folder(tokenizer: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(tokenizer, folder / "tokenizer.json")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


def _options() -> argparse.Namespace:
    english = [str(DATA / "en" / "gutenberg.jsonl.zst")]
    korean = [str(DATA / "ko" / name) for name in ("reviews.jsonl.zst", "law.jsonl.zst")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", nargs="+", default=english, metavar="FILE", help="English text")
    parser.add_argument("--korean", nargs="+", default=korean, metavar="FILE", help="Korean text")
    parser.add_argument(
        "--tokenizer", type=Path, default=DATA / "tokenizers" / "20B_tokenizer.json", help="tokenizer.json"
    )
    parser.add_argument("--mib", type=float, default=0, help="repeat the text up to this many MiB (default: once)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of each contender")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender; the best counts (default: 3)")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--ours", action="store_true", help="only this project, with gigatoken")
    parser.add_argument("--scratch", type=Path, help="folder for temporary texts and outputs")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
