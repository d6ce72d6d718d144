"""The disk space that a run needs, for the dry run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.checks.dry_run.run_plan import Row, times_in_run
from pipeline.config.method import starts_from_expansion
from pipeline.config.run import RunConfig
from pipeline.conversion.convert import HF_FOLDER
from pipeline.data.corpus.manifest import MANIFEST as CORPUS_MANIFEST
from pipeline.data.tokenize.corpora import corpus_jobs, train_folder
from pipeline.data.tokenize.disk_space import corpus_bytes
from pipeline.data.tokenize.input_files import is_here
from pipeline.errors import PreflightError, UserError
from pipeline.files.disk_space import free_bytes, held_bytes, nearest_existing
from pipeline.sizing.checkpoints import (
    checkpoint_bytes,
    checkpoints_bytes,
    most_checkpoints,
    no_room,
)
from pipeline.sizing.estimate import Estimator

_TOKEN_BYTES = 4
"""The bytes of a token, for a vocabulary above 65,536."""
_EXPANSION_BYTES = 4
"""The bytes of an element of the initial expansion, which is stored in fp32."""


def checkpoint_rows(estimator: Estimator, faults: list[UserError]) -> Iterator[Row]:
    """Number and size of the checkpoints. A fault is added if the disk has too little space."""
    config = estimator.config
    folder = config.checkpoint_folder
    needed = _more_checkpoint_bytes(estimator)
    free = free_bytes(folder)
    number = times_in_run(config, config.checkpoints.every_steps)
    size = checkpoint_bytes(estimator.parameters)
    yield (
        "checkpoints",
        f"{number:,} of {size / 1e9:.3g} GB each, at most {most_checkpoints(config)} at once",
    )
    yield "checkpoints", f"{needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
    if free < needed:
        faults.append(no_room(folder, needed, free))


def disk_space_rows(estimator: Estimator, faults: list[UserError]) -> Iterator[Row]:
    """About how much all stages will yet write, by kind, and the free space.

    The folder of the run and the folder of the data may be on two file systems, which are compared
    apart. A fault is added if one of them has too little space.
    """
    config = estimator.config
    parameters = estimator.parameters
    folder = config.folder
    checkpoints = _more_checkpoint_bytes(estimator)
    needed_by_kind = {"checkpoints": checkpoints}
    if starts_from_expansion(config.method) and config.init_expansion is None:
        expansion = parameters.expansion * _EXPANSION_BYTES
        held = held_bytes(config.initial_expansion_folder)
        needed_by_kind["expansion"] = max(0, expansion - held)
    # The export has the base's dtype, which is the dtype of training on GPUs.
    export = parameters.total * estimator.deepspeed.dtype.itemsize
    needed_by_kind["export"] = max(0, export - held_bytes(folder / HF_FOLDER))

    needed_on = {folder: sum(needed_by_kind.values())}
    tokens = _more_token_bytes(config)
    texts = ["tokens unknown"]
    if tokens is not None:
        texts = [f"tokens {tokens / 1e9:.3g}"]
        data = config.data.folder
        if _device_of(data) == _device_of(folder):
            needed_on[folder] += tokens
        else:
            needed_on[data] = tokens
    texts += [f"{kind} {size / 1e9:.3g}" for kind, size in needed_by_kind.items()]
    total = sum(needed_on.values())
    yield "disk space", f"about {total / 1e9:.3g} GB more: {', '.join(texts)}"
    for place, needed in needed_on.items():
        free = free_bytes(place)
        yield "disk space", f"{place}: {needed / 1e9:.3g} GB more needed, {free / 1e9:.3g} GB free"
        # If the checkpoints alone do not fit, `checkpoint_rows` has added a fault.
        if needed > free > checkpoints:
            faults.append(
                PreflightError(
                    f"{place}: tokens, expansion, checkpoints and export need about "
                    f"{needed / 1e9:.3g} GB more, found {free / 1e9:.3g} GB free; make room, or "
                    "set folder or data.folder to another disk"
                )
            )


def _more_checkpoint_bytes(estimator: Estimator) -> int:
    """The bytes that the checkpoints need beyond those that their folder holds already."""
    config = estimator.config
    needed = checkpoints_bytes(config, estimator.parameters)
    return max(0, needed - held_bytes(config.checkpoint_folder))


def _more_token_bytes(config: RunConfig) -> int | None:
    """About the bytes of corpora that are not made yet; None if an input is not on this machine."""
    data = config.data
    needed = 0
    try:
        for job in corpus_jobs(data, config.tokenizer):
            if (job.output / CORPUS_MANIFEST).exists():
                continue
            if not is_here(job.corpus.input):
                return None  # It is on the hub, or on an object store.
            needed += max(0, corpus_bytes(job) - held_bytes(job.output))
    except (UserError, OSError):
        return None  # It is among the faults.
    for name, corpus in data.corpora.items():
        if corpus.sample is not None and not (train_folder(data, name) / CORPUS_MANIFEST).exists():
            needed += corpus.sample.tokens * _TOKEN_BYTES
    return needed


def _device_of(folder: Path) -> int:
    """The number of the file system of a folder, which need not exist."""
    return nearest_existing(folder).stat().st_dev
