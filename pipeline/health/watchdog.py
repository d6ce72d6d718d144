"""Ends a run whose ranks no longer work together, quickly and with one line that says whose fault it is.

Each rank has a thread that tells the first rank where it is, and hears that the first rank is alive; the first rank
judges all, all judge the first. docs/adr/0010-a-side-channel-of-lines.md says why not over the collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.config import run as settings
from pipeline.errors import LayoutError, exit_code_of, in_one_line
from pipeline.health.liveness import Limits, Phases, RankHealth, Report, Verdict, beat, goodbye, report_failure
from pipeline.log import node
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks

# --- Lines between the first rank and every other, beside the training's collectives, which may be what hangs -------
# The first rank listens; each other one holds a connection to it, so that a process that is killed is missed at once.

CONNECT_S = 30.0
_LONGEST_LINE = 2**16

Message = dict[str, Any]
OnMessage = Callable[[int, Message], None]
"""Takes a rank and what it said."""
OnDisconnect = Callable[[int], None]
"""Takes a rank whose connection broke."""


class Channel(Protocol):
    """One rank's end. All but its making belongs to the thread of one event loop."""

    async def open(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> None:
        """Begins to listen."""

    def send(self, message: Message) -> None:
        """Says something: the first rank to all others, they to it."""

    async def close(self) -> None:
        """Sends what is left, and hangs up."""


def connect() -> Channel:
    """This rank's end; every rank must call it.

    Raises:
        LayoutError: a rank cannot reach the first one.
    """
    rank = dist.get_rank()
    listener = _listen() if rank == 0 else None
    port = 0 if listener is None else int(listener.getsockname()[1])
    token, port = broadcast_from_rank0(lambda: (secrets.token_hex(16), port))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")  # where the first rank was found before
    caller = run_on_all_ranks(lambda: None if rank == 0 else _call(address, port, rank, token))
    if listener is not None:
        return Hub(listener, token)
    assert caller is not None
    return Spoke(caller)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def _call(address: str, port: int, rank: int, token: str) -> socket.socket:
    try:
        caller = socket.create_connection((address, port), timeout=CONNECT_S)
        caller.sendall(_line({"rank": rank, "token": token}))
    except OSError as error:
        raise LayoutError(
            f"{node()} cannot reach the first rank at {address}, port {port} ({error}), though the ranks have met; "
            "open net.ipv4.ip_local_port_range between the nodes, as gloo and NCCL need it too"
        ) from None
    return caller


class Hub:
    """The first rank's end."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def open(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> None:
        """See `Channel`."""
        self._on_message, self._on_disconnect = on_message, on_disconnect
        self._server = await asyncio.start_server(self._attend, sock=self._listener, limit=_LONGEST_LINE)

    def send(self, message: Message) -> None:
        """See `Channel`."""
        for writer in self._writers.values():
            writer.write(_line(message))

    async def close(self) -> None:
        """See `Channel`."""
        self._server.close()
        await asyncio.gather(*map(_hang_up, self._writers.values()))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await _read(reader) or {}
        rank = greeting.get("rank")
        if greeting.get("token") != self._token or not isinstance(rank, int):
            writer.close()  # some stranger who tries ports
            return
        self._writers[rank] = writer
        while message := await _read(reader):
            self._on_message(rank, message)
        del self._writers[rank]
        writer.close()
        self._on_disconnect(rank)


class Spoke:
    """Every other rank's end."""

    def __init__(self, caller: socket.socket) -> None:
        self._caller = caller

    async def open(self, on_message: OnMessage, on_disconnect: OnDisconnect) -> None:
        """See `Channel`."""
        reader, self._writer = await asyncio.open_connection(sock=self._caller, limit=_LONGEST_LINE)
        self._listening = asyncio.create_task(self._listen(reader, on_message, on_disconnect))

    def send(self, message: Message) -> None:
        """See `Channel`."""
        if not self._writer.is_closing():
            self._writer.write(_line(message))

    async def close(self) -> None:
        """See `Channel`."""
        self._listening.cancel()
        await _hang_up(self._writer)

    async def _listen(self, reader: asyncio.StreamReader, on_message: OnMessage, on_disconnect: OnDisconnect) -> None:
        while message := await _read(reader):
            on_message(0, message)
        self._writer.close()
        on_disconnect(0)


async def _read(reader: asyncio.StreamReader) -> Message | None:
    """The next line's content; None when the other end is gone, or talks gibberish."""
    try:
        message = json.loads(await reader.readline())
    except (OSError, ValueError):  # cut off, a line without end, or none that is JSON
        return None
    return message if isinstance(message, dict) else None


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(writer.drain(), timeout=1)
    writer.close()


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


# --- Ends a run whose ranks no longer work together, quickly and  ---

LAST_ACTS_S = 5.0
"""For writing the stacks and the log, on a disk that may hang too."""
_WAITING_IN = ("/torch/distributed/", "/torch/autograd/", "/deepspeed/", "/pipeline/parallel/ranks.py")
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
        self._health = RankHealth(watched, self._limits, time.monotonic())
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            self._leave(goodbye())
            return
        if lost_a_peer(error):
            # The thread learns who it was, and ends this process. Only if it does not, the exception has the last word.
            time.sleep(self._limits.dead_after_s + 2 * self._beat_every_s + LAST_ACTS_S)
        self._leave(report_failure(in_one_line(error), exit_code_of(error)))

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
        await self._channel.open(self._on_message, self._on_disconnect)
        while self._last_message is None:
            report = self._report()
            self._channel.send(beat(report))
            if self._rank == 0:
                self._on_message(0, beat(report))
            if verdict := self._health.judge(time.monotonic()):
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
            self._health.extend_deadline(overslept)

    async def _woken(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout=timeout_s)
        self._wake.clear()

    def _on_message(self, rank: int, message: Message) -> None:
        if "verdict" in message:
            self._health.accept(Verdict(**message["verdict"]))
        else:
            self._health.on_message(rank, message, time.monotonic())
        if "report" not in message:
            self._wake.set()

    def _on_disconnect(self, rank: int) -> None:
        self._health.on_disconnect(rank)
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
