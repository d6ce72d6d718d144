"""Runs the cleaning of a corpus: restartable; and what it leaves, with a manifest."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import dill
import orjson
import zstandard
from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.utils.logging import logger as datatrove_logger
from pydantic import BaseModel

from pipeline import log
from pipeline.data.corpus.indexed_dataset import FileContent, check_file, content_of
from pipeline.data.sources.file_state import FileState, check_all_unchanged, state_of
from pipeline.data.sources.object_stores import InputPath, input_path
from pipeline.data.sources.streams import likely_encoding
from pipeline.data.tokenize.corpora import text_keys_of
from pipeline.data.tokenize.documents import sampled_documents
from pipeline.data.tokenize.input_files import input_files, named_files
from pipeline.data.tokenize.queue import warn_of_repeats
from pipeline.data.tokenize.workers import local_workers
from pipeline.errors import DataError, UserError, faults_of_library, in_one_line, printable
from pipeline.extensions.cleaning.blocks import LOST_BYTES, READ_BYTES
from pipeline.extensions.cleaning.stages import DROPPED, CleaningJob, CleaningStage, stages_of
from pipeline.files.folders import FolderKind, check_replaceable, replace_directory
from pipeline.files.json_files import read_record, write_record
from pipeline.files.threads import in_threads

_FORMAT: Literal["scale-cpt cleaned text 1"] = "scale-cpt cleaned text 1"
_CLEANED = FolderKind("cleaned text", "manifest.json", _FORMAT)
_PLAN = "plan.json"
# What workers import before their first task.
_PRELOAD = "pipeline.extensions.cleaning.stages"
# Bytes of text that an estimate cleans at least.
_LEAST_SAMPLE = 2**20
_SETTINGS = {"input", "clean", "text_key", "document", "encoding", "quoting", "normalize"}
"""The settings of a corpus that decide what is left of it."""
# A larger share of the text in rejected records is said, with so many files.
_LOST_SHARE = 0.01
_MOST_NAMED = 5
_logger = log.get_logger(__name__)
# datatrove's bars and lines of a task, which would mix with ours.
_NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115  # open as long as the process


class CleaningPlan(BaseModel):
    """What cleaning is begun for: settings of the corpus, and the sizes of all its input files.

    `states`: these files as the job found them; none in a plan of an earlier version.
    """

    format: Literal["scale-cpt cleaned text 1"] = _FORMAT
    settings: dict[str, Any]
    files: dict[str, int]
    states: dict[str, FileState] = {}


class CleanedText(CleaningPlan):
    """The manifest of cleaned text.

    `steps`: of each the documents that reached it ("total"), "dropped" and "changed", and the
    reasons.
    """

    steps: dict[str, dict[str, int]]

    @property
    def documents(self) -> int:
        """How many are left."""
        return self.steps.get("written", {}).get("total", 0)


class TaskRecord(BaseModel):
    """The record of a finished task: the files that it wrote, by their paths in the work folder."""

    stage: str
    task: int
    files: dict[str, FileContent]


class _Recording(PipelineExecutor):
    """Records the files of a task, which match `patterns`, before datatrove marks it as done."""

    patterns: list[str]

    def mark_rank_as_completed(self, rank: int) -> None:
        logs = Path(self.logging_dir.path)
        work = logs.parents[1]
        stage = logs.name
        files: dict[str, FileContent] = {}
        for pattern in (f"logs/{stage}/stats/{rank:05d}.json", *self.patterns):
            for path in work.glob(pattern.format(rank=rank)):
                files[str(path.relative_to(work))] = content_of(path)
        record = TaskRecord(stage=stage, task=rank, files=dict(sorted(files.items())))
        path = _record_of(work, stage, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, record)
        super().mark_rank_as_completed(rank)


class _Local(_Recording, LocalPipelineExecutor):
    pass


class _Arrays(_Recording, SlurmPipelineExecutor):
    """Job arrays without datatrove's request of memory, and without its job that sums counts.

    datatrove writes paths into its batch script as they are; here they may have spaces.
    """

    def get_sbatch_args(self, *arguments: int) -> dict[str, str]:
        quoted: dict[str, str] = {}
        for name, value in super().get_sbatch_args(*arguments).items():
            if name != "mem-per-cpu":
                quoted[name] = shlex.quote(str(value)) if value else ""
        return quoted

    def get_launch_file_contents(self, sbatch_args: dict[str, str], run_script: str) -> str:
        program = self.logging_dir.resolve_paths("executor.pik")
        run_script = run_script.replace(program, shlex.quote(program))
        script: str = super().get_launch_file_contents(sbatch_args, run_script)
        return script

    def launch_merge_stats(self) -> None:
        pass


def clean(job: CleaningJob, workers: int) -> CleanedText:
    """Cleans a corpus, or continues; text that is cleaned already is left as it is.

    Raises:
        DataError: an input cannot be used, nothing is left, or the folder was made for another
            corpus.
        OutputError: the folder holds something else.
    """
    check_replaceable(job.output, _CLEANED)
    check_replaceable(job.work, FolderKind("unfinished cleaning", _PLAN, _FORMAT))
    plan = _plan_of(job)
    manifest = job.output / "manifest.json"
    if manifest.exists():
        _check_plan(manifest, plan)
        # Left by a program that was killed at its end.
        shutil.rmtree(job.work, ignore_errors=True)
        return read_record(manifest, CleanedText, DataError)
    if (job.work / _PLAN).exists():
        plan = _check_plan(job.work / _PLAN, plan)
    else:
        plan = _with_states(plan)
    stages = stages_of(job, plan.states)
    job.work.mkdir(parents=True, exist_ok=True)
    write_record(job.work / _PLAN, plan)
    for stage in stages:
        _run(job, stage, workers)
    # Also what is read once, as benchmarks are.
    check_all_unchanged(plan.states.items())
    _warn_of_lost(job, stages[0])
    cleaned = CleanedText(**plan.model_dump(), steps=_counts(job, stages))
    if not cleaned.documents:
        raise DataError(f"{job.work}: no document is left: {cleaned.steps}")
    # The manifest comes first: the folder is complete as soon as it has its name.
    write_record(job.work / "output" / "manifest.json", cleaned)
    replace_directory(job.work / "output", job.output)
    shutil.rmtree(job.work)
    return cleaned


def _check_plan(file: Path, plan: CleaningPlan) -> CleaningPlan:
    """The plan that a plan's or a manifest's `file` holds, which is to be `plan`.

    Raises:
        DataError: it is another one, or an input changed.
    """
    found = read_record(file, CleaningPlan, DataError)
    if found.model_copy(update={"states": {}}) != plan:
        advice = "set them back, or remove the folder to clean again"
        raise DataError(f"{file.parent}: was made with other settings or inputs; {advice}")
    try:
        check_all_unchanged(found.states.items())
    except DataError as fault:
        raise DataError(f"{file.parent}: was made with other inputs: {fault}") from None
    return found


def _with_states(plan: CleaningPlan) -> CleaningPlan:
    """The plan with its files as they are now."""
    files = [input_path(name) for name in plan.files]
    states: dict[str, FileState] = {}
    # In threads, because hashing a file is reading it.
    for name, state in zip(plan.files, in_threads(state_of, files), strict=True):
        states[name] = state
    return plan.model_copy(update={"states": states})


def table(steps: Mapping[str, Mapping[str, int]]) -> str:
    """What each step did, as lines of text: see `CleanedText.steps`."""
    lines = [f"{'step':<16}{'documents':>12}{'dropped':>12}{'changed':>12}  reasons"]
    for name, found in steps.items():
        counts = ""
        for key in ("total", "dropped", "changed"):
            counts += f"{found.get(key, 0):>12,}"
        reasons: Counter[str] = Counter()
        for key, count in found.items():
            if key.startswith("dropped_"):
                reasons[key.removeprefix("dropped_")] = count
        most = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common(3))
        lines.append(f"{name:<16}{counts}  {most}".rstrip())
    return "\n".join(lines)


def examples(folder: Path, count: int) -> Iterator[str]:
    """The beginnings of `count` documents that each step dropped from a cleaned text, and why.

    Raises:
        DataError: `folder` does not exist.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; run scale-cpt clean first")
    for step in sorted(folder.glob(f"{DROPPED}/*")):
        shards = sorted(step.glob("*.jsonl.zst"))
        # Equally many of each shard, rounded up.
        of_shard = -(-count // max(1, len(shards)))
        of_each = chain.from_iterable(_documents(shard, of_shard) for shard in shards)
        for document in islice(of_each, count):
            reason = document["reason"] and f" ({document['reason']})"
            text = " ".join(document["text"].split())[:200]
            yield printable(f"{step.name}{reason}: {text}")


def _documents(shard: Path, most: int) -> Iterator[dict[str, Any]]:
    with zstandard.open(shard, "rt", encoding="utf-8") as lines:
        yield from map(orjson.loads, islice(lines, most))


def estimate(job: CleaningJob, workers: int) -> str:
    """What cleaning a hundredth of the input says of the whole.

    Near-copies are found within that only.
    """
    given = job.corpus
    sizes = input_files(given.input)
    encoding = given.encoding or likely_encoding(next(iter(sizes)))
    keys = text_keys_of(given)._replace(encoding=encoding)
    size = max(sum(sizes.values()) // 100, _LEAST_SAMPLE)
    documents, scale = sampled_documents(given.input, keys, size)
    with tempfile.TemporaryDirectory() as folder:
        sample = Path(folder, "sample.jsonl")
        output = Path(folder, "cleaned")
        began = time.monotonic()
        with sample.open("wb") as file:
            for document in documents:
                file.write(orjson.dumps({"text": document.text}) + b"\n")
        changes = {"input": [str(sample)], "text_key": "text", "encoding": None}
        corpus = given.model_copy(update=changes)
        cleaned = clean(replace(job, corpus=corpus, output=output, others=()), workers)
        written = sum(file.stat().st_size for file in output.rglob("*.zst"))
    hours = (time.monotonic() - began) * scale / 3600
    mib = written * scale / 2**20
    # Of the sample; copies in the rest of the corpus are not found.
    share = cleaned.documents / len(documents)
    left = cleaned.documents * scale
    what = (
        f"about {share:.1%} of the documents, {left:,.0f} in all, {mib:,.0f} MiB; "
        f"{hours:,.1f} hours"
    )
    return f"{table(cleaned.steps)}\n{job.output}: {what} with {workers} processes"


def submit(job: CleaningJob, partition: str, limit: str) -> int:
    """Begins a job as job arrays of Slurm, which `clean` then finishes.

    Returns the id of the last.
    """
    check_replaceable(job.work, None)
    plan = _with_states(_plan_of(job))
    job.work.mkdir(parents=True)
    write_record(job.work / _PLAN, plan)
    last: Any = None
    for stage in stages_of(job, plan.states):
        executor = _Arrays(
            stage.blocks,
            stage.tasks,
            limit,
            partition,
            job_name=f"clean-{stage.name}",
            qos="",
            # A job whose predecessor failed ends, so that `clean` can do what is left.
            sbatch_args={"kill-on-invalid-dep": "yes"},
            depends=last,
            logging_dir=str(job.work.absolute() / "logs" / stage.name),
        )
        executor.patterns = stage.files
        # Only the last is started: it starts those that it depends on.
        last = executor
    with faults_of_library(f"{job.output}: cannot submit", DataError):
        last.run()
    return int(last.job_id)


def _plan_of(job: CleaningJob) -> CleaningPlan:
    settings = job.corpus.model_dump(mode="json", include=_SETTINGS)
    files: list[InputPath] = []
    for corpus in (job.corpus, *job.heldout, *job.others):
        files += input_files(corpus.input)
    files += named_files(settings["clean"]["benchmarks"])
    for name in ("quoting", "normalize"):
        # Text that an earlier version cleaned has none of them.
        if settings[name] is None:
            del settings[name]
    sizes = {str(file): int(file.stat().st_size) for file in files}
    return CleaningPlan(settings=settings, files=sizes)


def _run(job: CleaningJob, stage: CleaningStage, workers: int) -> None:
    """Runs the tasks of a stage that are not done yet. One that fails does not stop the others."""
    logs = job.work / "logs" / stage.name
    # Each task has a file of its lines.
    datatrove_logger.remove()
    executor = _Local(stage.blocks, stage.tasks, logging_dir=str(logs))
    executor.patterns = stage.files
    _reopen_changed(job, stage.name, workers)
    left = [f"{stage.name}, task {rank}" for rank in executor.get_incomplete_ranks()]
    if not left:
        return
    title = f"{job.output.name}: {stage.name}"
    done = stage.tasks - len(left)
    faults: list[str] = []
    with (
        local_workers(min(workers, len(left)), preload=_PRELOAD) as pool,
        log.progress_bar(title, stage.tasks, " tasks", done=done) as progress,
    ):
        for fault in pool.run(partial(_fault_of, dill.dumps(executor)), left):
            if fault:
                faults.append(fault)
            else:
                progress.update(1)
    if faults:
        raise DataError(
            f"{job.output}: {'; '.join(faults[:3])}; {logs} says more; start again to continue"
        )


def _reopen_changed(job: CleaningJob, stage: str, workers: int) -> None:
    """Lets finished tasks be done again of which a file is missing or not as it was written."""
    marks = job.work / "logs" / stage / "completions"
    if not marks.is_dir():
        return
    done = sorted(int(mark.name) for mark in marks.iterdir())
    if not done:
        return
    title = f"{job.output.name}: checking {stage}"
    faults: list[str] = []
    check = partial(_change_of, job.work, stage)
    with (
        local_workers(min(workers, len(done)), preload=_PRELOAD) as pool,
        log.progress_bar(title, len(done), " tasks") as progress,
    ):
        for task, fault in pool.run(check, done):
            progress.update(1)
            if fault:
                faults.append(fault)
                (marks / f"{task:05d}").unlink()
    warn_of_repeats(faults)


def _change_of(work: Path, stage: str, task: int) -> tuple[int, str]:
    """A finished task, and what is not as it was then; empty where all is."""
    path = _record_of(work, stage, task)
    again = f"task {task} of {stage} is done again"
    try:
        record = read_record(path, TaskRecord, DataError, again, needs_checksum=True)
        if (record.stage, record.task) != (stage, task):
            raise DataError(f"{path}: is of another task; {again}")
        for name, content in record.files.items():
            check_file(work / name, content, again)
    except FileNotFoundError:
        return task, f"{path}: no such file; {again}"
    except DataError as fault:
        return task, str(fault)
    return task, ""


def _record_of(work: Path, stage: str, task: int) -> Path:
    return work / "logs" / stage / "files" / f"{task:05d}.json"


def _fault_of(executor: bytes, task: str) -> str:
    """Runs a task, and returns its fault.

    A fault of the user's or of a disk is raised instead, as another attempt would not help.

    Raises:
        UserError: a fault of the user's.
        OSError: a fault of a disk.
    """
    try:
        with contextlib.redirect_stderr(_NOWHERE):
            dill.loads(executor)._run_for_rank(int(task.rpartition(" ")[2]))
    except (UserError, OSError):
        raise
    except Exception as error:  # noqa: BLE001  # of any block
        return f"{task}: {in_one_line(error)}"
    return ""


def _warn_of_lost(job: CleaningJob, first: CleaningStage) -> None:
    """Names the files of which rejected records hold more than a small share of the text.

    Few records may be most of a corpus, as one that is too large is, and their number is small.
    """
    read = 0
    lost: Counter[str] = Counter()
    for stats in _statistics(job, first):
        if stats["name"] != "records":
            continue
        for name, value in stats["stats"].items():
            total = int(value["total"] if isinstance(value, dict) else value)
            if name == READ_BYTES:
                read += total
            elif name.startswith(LOST_BYTES):
                lost[name.removeprefix(LOST_BYTES)] += total
    share = lost.total() / max(1, read + lost.total())
    if share <= _LOST_SHARE:
        return
    for file, size in lost.most_common(_MOST_NAMED):
        message = "%s: %s: %d bytes of text are in records that were rejected (%.1f %% of all are)"
        _logger.warning(message, job.output, file, size, 100 * share)


def _statistics(job: CleaningJob, stage: CleaningStage) -> Iterator[dict[str, Any]]:
    """What datatrove counted in each block of each task of a stage."""
    for file in sorted((job.work / "logs" / stage.name / "stats").glob("*.json")):
        yield from orjson.loads(file.read_bytes())


def _counts(job: CleaningJob, stages: list[CleaningStage]) -> dict[str, dict[str, int]]:
    """What each step counted in all tasks: see `CleanedText.steps`.

    The counts are read from datatrove's files of statistics.
    """
    counts: dict[str, Counter[str]] = {}
    for stage in stages:
        for block in _statistics(job, stage):
            if " - " in block["name"]:
                # datatrove's own name: a block that is no step.
                continue
            for name, value in block["stats"].items():
                if name not in ("total", "dropped", "changed") and not name.startswith("dropped_"):
                    continue
                total = value["total"] if isinstance(value, dict) else value
                counts.setdefault(block["name"], Counter())[name] += int(total)
    return {name: dict(sorted(found.items())) for name, found in counts.items()}
