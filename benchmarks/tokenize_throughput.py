"""How fast JSONL becomes tokens on disk: this project compared with Megatron-LM's scripts and `datasets.map`.

    python benchmarks/tokenize_throughput.py --megatron PATH --json benchmarks/out/tokenize.json

Every contender is a whole process that reads the same file with the same tokenizer and number of workers. `seconds` is
the process from start to end, `work_seconds` without its start-up (the same program with --help), `cpu_seconds` the
processor time of all its processes, `peak_mib` the memory of the largest. The contenders take turns, and the best of
several rounds counts; on a busy machine compare the processor times. Megatron-LM's scripts run from a checkout that you
name; none of it is part of this project.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.data.tokenizer_training import texts
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


@dataclass(frozen=True)
class Result:
    """One contender on one text."""

    contender: str
    text: str
    megabytes: float
    seconds: float
    startup_seconds: float
    cpu_seconds: float
    startup_cpu_seconds: float
    peak_mib: float

    @property
    def work_seconds(self) -> float:
        return self.seconds - self.startup_seconds

    @property
    def megabytes_per_cpu_second(self) -> float:
        return self.megabytes / (self.cpu_seconds - self.startup_cpu_seconds)

    @property
    def megabytes_per_second(self) -> float:
        return self.megabytes / self.seconds

    @property
    def work_megabytes_per_second(self) -> float:
        return self.megabytes / self.work_seconds


def main() -> None:
    options = _options()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="tokenize-", dir=options.scratch) as scratch:
        folder = Path(scratch)
        tokenizer = _hugging_face_folder(options.tokenizer, folder / "tokenizer")
        for language, inputs in (("english", options.english), ("korean", options.korean)):
            source = _jsonl(inputs, folder / f"{language}.jsonl", options.mib)
            contenders = _contenders(options, source, tokenizer, folder / "out")
            for result in _compare(contenders, language, source, folder / "out", options.rounds):
                results.append(result)
                print(_row(result), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, _report(options, results))


def _contenders(options: argparse.Namespace, source: Path, tokenizer: Path, output: Path) -> dict[str, list[str]]:
    workers = str(options.workers)
    ours = [*OURS, "--input", str(source), "--tokenizer", str(tokenizer), "--output", str(output), "--workers", workers]
    found = {"ours, gigatoken": ours}
    if options.megatron:
        megatron = options.megatron / "tools"
        paths = ["--input", str(source), "--output-prefix", str(output)]
        named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer), "--append-eod"]
        fast = [sys.executable, str(megatron / "preprocess_data_fast.py")]
        found["Megatron-LM, preprocess_data_fast.py"] = [*fast, *paths, *named, "--use-gigatoken"]
    if options.slow:
        found["ours, tokenizers"] = [*ours, "--reference-only"]
        if options.megatron:
            slow = [sys.executable, str(megatron / "preprocess_data.py")]
            found["Megatron-LM, preprocess_data.py"] = [*slow, *paths, *named, "--workers", workers]
        found["datasets.map"] = [sys.executable, "-c", DATASETS_MAP, str(source), str(tokenizer), str(output), workers]
    return found


def _compare(contenders: dict[str, list[str]], language: str, source: Path, output: Path, rounds: int) -> list[Result]:
    """The best of `rounds` runs of each."""
    runs: dict[str, list[_Run]] = {name: [] for name in contenders}
    startups: dict[str, list[_Run]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, command in contenders.items():
            for path in output.parent.glob(output.name + "*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            runs[name].append(_run(command))
            startups[name].append(_run([*command[: 3 if command[1] == "-c" else 2], "--help"]))
    return [
        Result(
            contender=name,
            text=language,
            megabytes=source.stat().st_size / 1e6,
            seconds=min(run.seconds for run in done),
            startup_seconds=min(run.seconds for run in startups[name]),
            cpu_seconds=min(run.cpu_seconds for run in done),
            startup_cpu_seconds=min(run.cpu_seconds for run in startups[name]),
            peak_mib=min(run.peak_mib for run in done),
        )
        for name, done in runs.items()
    ]


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


def _row(result: Result) -> str:
    return (
        f"{result.text:8} {result.contender:38} {result.megabytes:6.1f} MB  {result.seconds:6.2f} s "
        f"{result.megabytes_per_second:6.1f} MB/s   without start-up {result.work_seconds:6.2f} s "
        f"{result.work_megabytes_per_second:6.1f} MB/s   processors {result.cpu_seconds:6.2f} s, "
        f"without start-up {result.megabytes_per_cpu_second:6.1f} MB/s each   "
        f"peak {result.peak_mib:6.0f} MiB"
    )


def _report(options: argparse.Namespace, results: Sequence[Result]) -> dict[str, object]:
    derived = ("work_seconds", "megabytes_per_second", "work_megabytes_per_second", "megabytes_per_cpu_second")
    rows = [asdict(result) | {name: getattr(result, name) for name in derived} for result in results]
    return {"workers": options.workers, "cores": os.cpu_count(), "rounds": options.rounds, "results": rows}


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
    parser.add_argument("--fast-only", dest="slow", action="store_false", help="leave out the slow contenders")
    parser.add_argument("--scratch", type=Path, help="folder for temporary texts and outputs")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
