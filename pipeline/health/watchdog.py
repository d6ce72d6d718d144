"""Ends a run within seconds when a rank is lost, hangs or fails, with one line that names the rank.

Each rank has a thread that sends heartbeats to rank 0 and receives rank 0's. Rank 0 judges all
ranks; the others judge rank 0. torch's own watchdogs only time out, without the name of the missing
rank: docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

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
from types import FrameType

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.config.health import WatchdogSettings
from pipeline.errors import exit_code_of, in_one_line
from pipeline.health import channel
from pipeline.health.channel import Message
from pipeline.health.liveness import INTERRUPTION, RankHealth, RankReport, Verdict
from pipeline.health.phases import Phases
from pipeline.log import node

LAST_ACTS_S = 5.0
"""Limit for writing the stacks and the log, since the disk may hang too."""
# Rank 0 reads the messages of thousands of ranks at once: waking up costs more than reading one.
_POLL_S = 0.05
_WAITING_IN = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/deepspeed/",
    "/pipeline/parallel/ranks.py",
)
"""Parts of the paths of the files whose functions wait for other ranks."""
_INTERRUPTED: Message = {"interrupted": True}
_logger = log.get_logger(__name__)


class RankWatchdog:
    """A context manager: while it is entered, this rank is watched. Every rank must enter it.

    When a rank is lost, hangs or fails, every other rank logs one line, writes the stacks of its
    threads into `stacks` and exits immediately with the verdict's exit code. The lowest rank that
    is not at fault calls `on_verdict` before it exits.

    All ranks end in the same way soon after `is_interrupted` says that the user wants an end
    without a save, whatever their main threads do.

    No rank leaves before rank 0, which may have more to do at the end. A launcher that waits a
    limited time after the first exit therefore does not take rank 0 for a rank that hangs.
    """

    def __init__(
        self,
        limits: WatchdogSettings,
        phases: Phases,
        stacks: Path,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        if self._rank != 0:
            # Only rank 0, which sees all ranks, can distinguish ranks that hang from ranks that
            # wait.
            limits = limits.model_copy(update={"hung_after_s": math.inf, "slow_after_s": math.inf})
        self._limits = limits
        self._phases = phases
        self._stacks = stacks
        self._on_verdict = on_verdict
        self._is_interrupted = is_interrupted
        self._main_thread = threading.main_thread().ident or 0
        self._last_message: Message | None = None
        self._continued_at = -math.inf

    def __enter__(self) -> RankWatchdog:
        """Connects the ranks and starts the thread.

        Raises:
            LayoutError: a rank cannot reach rank 0.
        """
        self._channel = channel.connect()
        watched = range(self._world_size) if self._rank == 0 else [0]
        self._health = RankHealth(watched, self._limits, time.monotonic())
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            # Not "left": the others may be in a collective that this rank will never join, and
            # must end too.
            self._send_last(_INTERRUPTED)
            return
        if not isinstance(error, Exception):
            self._send_last({"left": True})
            return
        if lost_a_peer(error):
            # The watchdog's thread will name that rank and end this process. If it has not done so
            # after this time, the exception itself is reported.
            time.sleep(self._limits.dead_after_s + 2 * self._limits.beat_every_s + LAST_ACTS_S)
        # At once, so that the others report this fault and not the broken connection that follows
        # it.
        self._send_last({"failed": in_one_line(error), "exit_code": exit_code_of(error)})

    def _send_last(self, message: Message) -> None:
        """Lets the thread send `message` and end. The other ranks wait until rank 0 has ended."""
        self._last_message = message
        self._thread.join(timeout=LAST_ACTS_S if self._rank == 0 else None)

    # --- The watchdog's thread ---

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # a fault of the watchdog must not end the run
            _logger.exception("the watchdog failed; the run continues without it")

    def _watch(self) -> None:
        heard_ranks = 1 if self._rank == 0 else self._world_size
        pause_s = heartbeat_interval_s(self._limits, heard_ranks)
        while self._last_message is None:
            self._send_heartbeat()
            verdict = self._health.judge(time.monotonic())
            if verdict is not None:
                self._announce(verdict)
            self._poll_until(time.monotonic() + pause_s)
        self._channel.send(self._last_message)
        if self._rank != 0:
            self._wait_for_rank0()
        self._channel.close()

    def _send_heartbeat(self) -> None:
        heartbeat = {"report": asdict(self._report())}
        self._channel.send(heartbeat)
        if self._rank == 0:
            self._health.on_message(0, heartbeat, time.monotonic())

    def _poll_until(self, next_beat: float) -> None:
        """Receives messages until the next heartbeat, the end of the block, or a verdict."""
        while time.monotonic() < next_beat:
            if self._last_message is not None or self._health.verdict is not None:
                return
            self._poll()

    def _wait_for_rank0(self) -> None:
        while not self._health.all_left:
            if self._health.judge(time.monotonic()) is not None:
                return
            self._poll()

    def _poll(self) -> None:
        """Waits a moment, and handles the messages that have arrived."""
        began = time.monotonic()
        # A sleep and not a select with a timeout: its length shows whether this process was
        # stopped.
        time.sleep(_POLL_S)
        paused_s = time.monotonic() - began
        if paused_s > self._limits.beat_every_s:
            # This process itself was stopped, as by SIGSTOP, and received nothing meanwhile.
            self._health.extend_deadline(paused_s)
            self._continued_at = time.monotonic()
        if self._health.verdict is None and self._is_interrupted():
            self._channel.send(_INTERRUPTED)
            self._health.accept(INTERRUPTION)
        for rank, message in self._channel.receive():
            if message is None:
                self._health.on_disconnect(rank)
            elif "verdict" in message:
                self._health.accept(Verdict(**message["verdict"]))
            else:
                self._health.on_message(rank, message, time.monotonic())

    def _report(self) -> RankReport:
        state = self._phases.state
        function, waiting = innermost(sys._current_frames().get(self._main_thread))
        return RankReport(
            node=node(),
            step=state.step,
            phase=state.phase,
            # Not the time for which the process was stopped: it would count as hung.
            phase_s=round(time.monotonic() - max(state.since, self._continued_at), 1),
            entered=state.entered,
            at=function,
            waiting=waiting,
        )

    def _announce(self, verdict: Verdict) -> None:
        """Ends the process, unless the main thread ends by itself within the verdict's grace."""
        if self._rank == 0:
            self._channel.send({"verdict": asdict(verdict)})
        deadline = time.monotonic() + verdict.grace_s
        while time.monotonic() < deadline:
            if self._last_message is not None:
                return
            self._poll()
        self._channel.close()
        # On a thread: a disk that hangs must not keep the process alive.
        last_acts = threading.Thread(target=self._last_acts, args=(verdict,), daemon=True)
        last_acts.start()
        last_acts.join(LAST_ACTS_S)
        # Not sys.exit: the main thread may hang in a collective, or in C code that never returns to
        # Python, and would be waited for.
        os._exit(verdict.exit_code)

    def _last_acts(self, verdict: Verdict) -> None:
        _logger.error("%s", verdict.text)
        ranks_not_at_fault = {*range(self._world_size)} - {verdict.rank}
        if self._rank == min(ranks_not_at_fault, default=0):
            self._on_verdict(verdict)
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._rank:05d}.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        logging.shutdown()
        sys.stdout.flush()


def heartbeat_interval_s(limits: WatchdogSettings, ranks: int) -> float:
    """The seconds between two heartbeats of each of `ranks` ranks.

    Rank 0 receives about 100 heartbeats a second, however many ranks there are. At least two of
    each rank arrive before the rank counts as dead.
    """
    return min(max(limits.beat_every_s, ranks / 100), limits.dead_after_s / 2)


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception may only follow from another rank's end, or from a lost message."""
    if isinstance(error, torch.distributed.DistError):
        return True
    if type(error) is not RuntimeError:
        return False
    # gloo's and NCCL's faults in C++ are plain RuntimeErrors in Python; only their texts tell them.
    text = str(error)
    return "gloo" in text or "NCCL" in text or "Connection closed" in text


def innermost(frame: FrameType | None) -> tuple[str, bool]:
    """A thread's innermost function, as "function (file:line)", and whether it waits for ranks."""
    if frame is None:
        return "nowhere", False
    path = Path(frame.f_code.co_filename)
    waits = any(part in path.as_posix() for part in _WAITING_IN)
    return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})", waits
