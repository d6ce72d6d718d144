"""Ends a run whose ranks no longer work together, quickly and with one line that says whose fault it is.

Each rank has a thread that tells the first rank where it is, and hears that the first rank is alive; the first rank
judges all, all judge the first. docs/adr/0010-a-side-channel-of-lines.md says why not over the collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.config import stability as settings
from pipeline.errors import exit_code_of, in_one_line
from pipeline.training.phases import Phases
from pipeline.training.roll_call import Limits, Report, RollCall, Verdict, beat, farewell, last_words
from pipeline.training.side_channel import Message, connect

LAST_ACTS_S = 5.0
"""For writing the stacks and the log, on a disk that may hang too."""
_WAITING_IN = ("/torch/distributed/", "/torch/autograd/", "/deepspeed/", "/pipeline/training/unison.py")
_logger = log.get_logger(__name__)


class Watchdog:
    """While it is entered, this rank is watched and watches. Every rank must enter it.

    When a rank is lost, hangs or fails, every other one says so in one line, writes its threads' stacks into `stacks`
    and exits at once with the verdict's exit code. The first that is not to blame calls `on_verdict` before.
    """

    def __init__(
        self,
        limits: settings.Watchdog,
        phases: Phases,
        stacks: Path,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self._beat_every_s = limits.beat_every_s
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        # Only who sees all can tell who hangs from who waits.
        patience = (limits.hung_after_s, limits.slow_after_s) if self._rank == 0 else (math.inf, math.inf)
        self._limits = Limits(limits.dead_after_s, *patience)
        self._phases = phases
        self._stacks = stacks
        self._on_verdict = on_verdict
        self._main = threading.main_thread().ident
        self._last_message: Message | None = None

    def __enter__(self) -> Watchdog:
        """Raises LayoutError where a rank cannot reach the first one."""
        self._channel = connect()
        watched = range(self._world_size) if self._rank == 0 else [0]
        self._roll = RollCall(watched, self._limits, time.monotonic())
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            self._leave(farewell())
            return
        if lost_a_peer(error):
            # The thread learns who it was, and ends this process. Only if it does not, the exception has the last word.
            time.sleep(self._limits.dead_after_s + 2 * self._beat_every_s + LAST_ACTS_S)
        self._leave(last_words(in_one_line(error), exit_code_of(error)))

    def _leave(self, message: Message) -> None:
        self._last_message = message
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(timeout=LAST_ACTS_S)

    # --- the watchdog's thread ---

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._watch())
        except Exception:  # a run must not end because its watchdog has a fault
            _logger.exception("the watchdog failed; the run goes on unwatched")

    async def _watch(self) -> None:
        await self._channel.open(self._hear, self._lose)
        while self._last_message is None:
            report = self._report()
            self._channel.send(beat(report))
            if self._rank == 0:
                self._hear(0, beat(report))
            if verdict := self._roll.judge(time.monotonic()):
                await self._announce(verdict)
            await self._pause()
        self._channel.send(self._last_message)
        await self._channel.close()

    async def _pause(self) -> None:
        """Until the next beat, or until there is something to act on."""
        began = time.monotonic()
        await self._woken(self._beat_every_s)
        overslept = time.monotonic() - began - self._beat_every_s
        if overslept > self._beat_every_s:
            self._roll.excuse(overslept)

    async def _woken(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout=timeout_s)
        self._wake.clear()

    def _hear(self, rank: int, message: Message) -> None:
        if "verdict" in message:
            self._roll.accept(Verdict(**message["verdict"]))
        else:
            self._roll.hear(rank, message, time.monotonic())
        if "report" not in message:
            self._wake.set()

    def _lose(self, rank: int) -> None:
        self._roll.lose(rank)
        self._wake.set()

    def _report(self) -> Report:
        place = self._phases.place
        function, waiting = innermost(sys._current_frames().get(self._main or 0))
        return Report(
            node=log.node(),
            step=place.step,
            phase=place.phase,
            phase_s=round(time.monotonic() - place.since, 1),
            entered=place.entered,
            at=function,
            waiting=waiting,
        )

    async def _announce(self, verdict: Verdict) -> None:
        """Ends the process, unless the verdict lets it leave by itself and it does."""
        if self._rank == 0:
            self._channel.send({"verdict": asdict(verdict)})
        deadline = time.monotonic() + verdict.patience_s
        while self._last_message is None and (left_s := deadline - time.monotonic()) > 0:
            await self._woken(left_s)
        if verdict.patience_s and self._last_message is not None:
            return
        await self._channel.close()
        acts = threading.Thread(target=self._last_acts, args=(verdict,), daemon=True)
        acts.start()
        acts.join(LAST_ACTS_S)
        os._exit(verdict.exit_code)

    def _last_acts(self, verdict: Verdict) -> None:
        _logger.error("%s", verdict.text)
        if self._rank == min({*range(self._world_size)} - {verdict.culprit}, default=0):
            self._on_verdict(verdict)
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._rank:05d}.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        logging.shutdown()
        sys.stdout.flush()


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception may be no more than the echo of another rank's end, or of a message that never came."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))


def innermost(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is, as "function (file:line)", and whether it is there because it waits for other ranks."""
    if frame is None:
        return "nowhere", False
    path = Path(frame.f_code.co_filename)
    waits = any(room in path.as_posix() for room in _WAITING_IN)
    return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})", waits
