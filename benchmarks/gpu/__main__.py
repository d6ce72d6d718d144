"""Proves the project on a machine with one NVIDIA GPU: what it computes, saves and needs, and its
speed.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --only quick
    python -m benchmarks.gpu --only parity attention
    python -m benchmarks.gpu --cpu

docs/gpu.md says what each part proves, and what to expect. A line has the part, the outcome of a
check, and what was found; the outcome is `-` where nothing is demanded. Each part runs in a process
of its own, which ends at its time limit. Results are also written as JSON, after every part. --cpu
tries all parts with tiny shapes. The parts of `quick` share one time limit on a GPU. Exits with 1
if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import CheckRow, Setting
from benchmarks.results import ROOT
from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.files.json_files import write_json
from pipeline.list_options import join_repeated_lists

PARTS: dict[str, tuple[str, ...]] = {
    "parity": ("parity", "check_parity"),
    "attention": ("attention", "check_attention"),
    "exports": ("exports", "check_exports"),
    "fp8": ("fp8", "check_fp8_products"),
    "deepspeed": ("zero_stages", "check_deepspeed"),
    "memory": ("memory", "check_memory"),
    "step-1b-8192": ("timed_steps", "check_steps", "1b-8192"),
    "step-1b-8192-packed": ("timed_steps", "check_steps", "1b-8192-packed"),
    "step-1b-4096": ("timed_steps", "check_steps", "1b-4096"),
    "step-8b-4096": ("timed_steps", "check_steps", "8b-4096"),
    "run": ("real_size_run", "check_run"),
    "watchdog": ("ranks", "check_watchdog"),
    "demo": ("demo", "check_demo"),
}
"""The module and function of each part, and what the function gets beside the setting; docs/gpu.md
describes them."""
QUICK = ("parity", "exports", "memory", "fp8")
"""The parts of `--only quick`, from what matters most."""
_QUICK_S = 180.0
"""What they may take together on a GPU: a verdict in three minutes."""
_PART_S = {"cuda": 180.0, "cpu": 600.0}
"""What a part may take by default."""
_LEAST_S = 5.0
"""With less time left no part begins: Python's imports take as long."""
_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "liger-kernel", "flash-attn")
_OUTCOMES = {True: "passed", False: "FAILED", None: "-"}
_GRACE_S = 10.0
"""For a part's processes to end by themselves."""


def rows_of(part: str, setting: Setting) -> Iterator[CheckRow]:
    """Runs a part in this process; what the others need is not imported."""
    module_name, function, *arguments = PARTS[part]
    module = importlib.import_module(f"benchmarks.gpu.{module_name}")
    rows: Iterator[CheckRow] = getattr(module, function)(setting, *arguments)
    return rows


def run_part(part: str, setting: Setting, seconds: float) -> list[CheckRow]:
    """The rows of a part, in a process of its own; one more if it fails or has to be ended."""
    device = setting.device_type
    folder = setting.folder
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part]
    # The part is ended from here; it knows its time, so as to begin nothing that it cannot end.
    command += ["--part-seconds", str(seconds), "--output", str(folder)]
    if device == "cpu":
        command.append("--cpu")
    path = str(ROOT)
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": device}
    if device == "cpu":
        # Threads would only wait for one another.
        environment["OMP_NUM_THREADS"] = "1"
        # DeepSpeed would import the compiler in every process.
        environment["TORCHDYNAMO_DISABLE"] = "0" if part.startswith("step-") else "1"
    log = folder / f"{part}.log"
    _rows_file(setting, part).unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        _end(process)
    rows = []
    if _rows_file(setting, part).exists():
        for line in _rows_file(setting, part).read_text(encoding="utf-8").splitlines():
            rows.append(CheckRow(**json.loads(line)))
    if code == -1:
        rows.append(CheckRow("ends in time", False, f"ended after {seconds:.0f} s; see {log}"))
    elif code:
        last = log.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        found = f"exit code {code}: {last[:400]}; see {log}"
        rows.append(CheckRow("ends well", False, found))
    return rows


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends all processes of a part's session: the stages of the demo have process groups of their
    own."""
    # First so that they may clean up, as trainers end their ranks.
    for number in (signal.SIGTERM, signal.SIGKILL):
        for member in _session(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            process.poll()  # a process that has ended belongs to its session until it is asked
            if not _session(process.pid):
                return
            time.sleep(0.1)


def _session(leader: int) -> list[int]:
    """The processes of the session that `leader` began."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == leader:
                members.append(int(entry.name))
    return members


def _rows_file(setting: Setting, part: str) -> Path:
    return setting.folder / f"{part}.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    join_repeated_lists(parser)
    names = [*PARTS, "quick"]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="PART", help=f"of: {', '.join(names)}"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="try all parts on the CPU with tiny shapes"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu"), help="a folder; default runs/gpu"
    )
    parser.add_argument(
        "--part-seconds", type=float, help="a part's time limit; default 180, with --cpu 600"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in this process
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        raise ConfigError("no GPU: torch finds no CUDA device; --cpu tries the check on the CPU")
    device_type = "cpu" if arguments.cpu else "cuda"
    seconds = arguments.part_seconds or _PART_S[device_type]
    setting = Setting(device_type, arguments.output.resolve(), seconds)
    setting.folder.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        write_part(arguments.part, setting)
        return 0
    # An exception, so that the part's processes end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parts = arguments.only or list(PARTS)
    total_seconds = math.inf
    if parts == ["quick"]:
        parts = list(QUICK)
        if setting.on_gpu:
            total_seconds = _QUICK_S
    failed = run_parts(parts, setting, total_seconds)
    return int(failed > 0)


def write_part(part: str, setting: Setting) -> None:
    """Runs a part in this process, and appends each row to its file as it is found."""
    for row in rows_of(part, setting):
        # Opened for each row: what a part has found before it is ended is in the file.
        with _rows_file(setting, part).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row._asdict()) + "\n")


def run_parts(parts: Sequence[str], setting: Setting, total_seconds: float = math.inf) -> int:
    """Runs parts in processes of their own, and writes results.json after each.

    After `total_seconds` the part that runs is ended, and no other begins. Returns the number of
    failed checks.
    """
    output = setting.folder / "results.json"
    about = about_machine(setting)
    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    deadline = time.monotonic() + total_seconds
    for part in parts:
        started = time.monotonic()
        left = deadline - started
        if left < _LEAST_S:
            found = f"no time left: make gpu ONLY={part} gives it {setting.seconds:.0f} s"
            found_rows = [CheckRow("begins in time", False, found)]
        else:
            found_rows = run_part(part, setting, min(setting.seconds, left))
        for row in found_rows:
            print(f"{part:<14}{_OUTCOMES[row.passed]:<8}{row.check}: {row.found}", flush=True)
            rows.append({"part": part, **row._asdict()})
        seconds[part] = round(time.monotonic() - started, 1)
        values = {"about": about, "on_gpu": setting.on_gpu, "rows": rows, "seconds": seconds}
        write_json(output, values)
    # Neither counts rows of which nothing is demanded: there `passed` is None.
    passed = sum(row["passed"] is True for row in rows)
    failed = sum(row["passed"] is False for row in rows)
    done = "run" if setting.on_gpu else "tried"
    print(f"{len(parts)} parts {done}: {passed} checks passed, {failed} failed; wrote {output}")
    return failed


def about_machine(setting: Setting) -> dict[str, str]:
    """The device, the machine, and the versions of the packages that matter."""
    about = {
        "device": torch.cuda.get_device_name() if setting.on_gpu else "cpu",
        "machine": platform.platform(),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about[package] = importlib.metadata.version(package)
    return about


if __name__ == "__main__":
    command_line.run(main)
