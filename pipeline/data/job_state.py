"""The state of a corpus in the making: what its folder was begun for, and which units of work a job does first.

It lies in the corpus's own folder, and is removed when the corpus is complete.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import orjson
from pydantic import BaseModel

from pipeline.errors import DataError
from pipeline.files import file_hash, rename_aside, write_json

_T = TypeVar("_T")
_Plan = TypeVar("_Plan", bound=BaseModel)
_PLAN = "plan.json"


def begin(output: Path, state: Path, plan: BaseModel) -> None:
    """Begins the corpus in `output` for `plan`, or continues one that was begun for the same.

    Raises:
        DataError: `state` cannot be made, or it was begun for another plan.
    """
    make_folder(state)
    found = begun_for(state, type(plan))
    if found is None:
        write_json(state / _PLAN, plan.model_dump())
        found = begun_for(state, type(plan))
    if found is not None:
        refuse_other(output, plan, found)


def begun_for(state: Path, kind: type[_Plan]) -> _Plan | None:
    """The plan for which a job began in the folder `state`; None where none has.

    Raises:
        DataError: it is of another kind: another tool is making a corpus there.
    """
    path = state / _PLAN
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise DataError(
            f"{path}: was written by another tool, which is making another corpus there; remove the folder "
            f"{state.parent} to start again, or choose another --output"
        ) from None


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, unless it exists.

    Raises:
        DataError: that is not possible.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{error.filename}: cannot make this folder ({error.strerror}); choose another --output"
        ) from None


def refuse_other(output: Path, expected: _Plan, found: _Plan) -> None:
    """Raises DataError where `output` was begun for another plan than `expected`; names the first difference."""
    for name in type(expected).model_fields:
        values = [repr(getattr(plan, name)) for plan in (expected, found)]
        if values[0] != values[1]:
            shown = [value if len(value) <= 120 else value[:117] + "..." for value in values]
            raise DataError(
                f"{output}: was begun with another {name.replace('_', ' ')}: expected {shown[0]}, found "
                f"{shown[1]}; set it back, or remove this folder and {output.name}.heldout to make the corpus again, "
                "or choose another --output"
            )


def remove_state(state: Path) -> None:
    """Removes the state of a finished corpus. It is renamed first, because another job may be reading it."""
    with contextlib.suppress(OSError):  # another job is renaming and removing it
        shutil.rmtree(rename_aside(state), ignore_errors=True)


def input_hash(state: Path, task: tuple[int, Path]) -> tuple[int, str]:
    """The number of an input file and its SHA-256, computed once and kept in the state."""
    index, path = task
    cached = state / f"{index:05d}.sha256.json"
    if not cached.exists():
        write_json(cached, file_hash(path))
    return index, str(orjson.loads(cached.read_bytes()))


def own_first(tasks: Sequence[_T], share: tuple[int, int]) -> list[_T]:
    """The tasks in the order of the k-th of n jobs, `share` (k, n), that make a corpus together.

    First come its own, then the other jobs' tasks from the end, which those jobs reach last.
    """
    k, n = share
    others = [task for at, task in enumerate(tasks) if at % n != k]
    return [*tasks[k::n], *reversed(others)]
