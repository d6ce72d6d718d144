"""Several processes that try inputs at the same time, and the results of all of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count

from pipeline.log import progress_bar
from tests.fuzz.runner import Laboratory
from tests.fuzz.table import Result

_KEPT_OF_A_KIND = 2


def fuzz(
    laboratory: Laboratory, targets: Sequence[str], *, lanes: int, ends: float, inputs: int | None = None
) -> list[Result]:
    """Tries the inputs of `targets` until the time `ends` (of the monotonic clock), or `inputs` of them; in order."""
    receiver, sender = os.pipe()
    failures = laboratory.folder / "failures"
    shutil.rmtree(failures, ignore_errors=True)
    failures.mkdir(parents=True)
    children = []
    for lane in range(lanes):
        child = os.fork()
        if child == 0:
            os.close(receiver)
            code = 1
            try:
                _run_lane(laboratory, _numbers(laboratory, targets, lane, lanes, inputs), lane, ends, sender)
                code = 0
            except BaseException:  # noqa: BLE001  nothing may return to the parent's code
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    os.close(sender)
    results, bad = [], 0
    try:
        with os.fdopen(receiver, "r") as lines, progress_bar("fuzzing", inputs or 0, "inputs") as bar:
            for line in lines:
                results.append(Result(**json.loads(line)))
                bad += not results[-1].is_good
                bar.set_postfix_str(f"{bad} not right or refused", refresh=False)
                bar.update(1)
    except KeyboardInterrupt:
        for child in children:
            os.kill(child, signal.SIGKILL)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert not any(code for code in codes if code != signal.SIGKILL), "a lane of the fuzz itself failed"
    return sorted(results, key=lambda result: result.number)


def _numbers(
    laboratory: Laboratory, targets: Sequence[str], lane: int, lanes: int, inputs: int | None
) -> Iterator[int]:
    """The numbers of the inputs that a lane tries."""
    chosen = (number for number in count() if laboratory.subject_of(number).target in targets)
    for turn, number in enumerate(chosen):
        if inputs is not None and turn >= inputs:
            return
        if turn % lanes == lane:
            yield number


def _run_lane(laboratory: Laboratory, numbers: Iterator[int], lane: int, ends: float, sender: int) -> None:
    """Tries inputs one after the other, writes a line for each, and keeps those that are not right or refused."""
    kept: Counter[tuple[str, str, str]] = Counter()
    for number in numbers:
        if time.monotonic() > ends:
            return
        result, place = laboratory.try_input(number, f"lane{lane}")
        if not result.is_good and kept[result.signature] < _KEPT_OF_A_KIND:
            kept[result.signature] += 1
            place.rename(laboratory.folder / "failures" / str(number))
        line = json.dumps(asdict(result)) + "\n"
        os.write(sender, line.encode())  # less than 4 KiB: lines of several lanes do not mix
