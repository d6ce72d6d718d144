"""Ends a run within seconds when a rank is lost, hangs or fails, with one line that names the rank.

Each rank has a thread that sends heartbeats to rank 0 and receives rank 0's. Rank 0 judges all ranks; the others judge
rank 0. The messages are lines of JSON over TCP, because a collective may be what hangs. torch's own watchdogs only time
out, without the name of the missing rank: docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import math
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.config import run as settings
from pipeline.errors import LayoutError, exit_code_of, in_one_line
from pipeline.health.liveness import Phases, RankHealth, RankReport, Verdict
from pipeline.log import node
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks

LAST_ACTS_S = 5.0
"""Limit for writing the stacks and the log, since the disk may hang too."""
CONNECT_S = 30.0
BACKLOG = 4096  # all ranks connect at once; asyncio's own is 100
_WAITING_IN = ("/torch/distributed/", "/torch/autograd/", "/deepspeed/", "/pipeline/parallel/ranks.py")
_logger = log.get_logger(__name__)
_LONGEST_LINE = 2**16

Message = dict[str, Any]


class Watchdog:
    """While it is entered, this rank is watched. Every rank must enter it.

    When a rank is lost, hangs or fails, every other rank logs one line, writes the stacks of its threads into `stacks`
    and exits immediately with the verdict's exit code. The lowest rank not at fault calls `on_verdict` before.
    No rank leaves before rank 0, which may have more to end; so no launcher takes rank 0 for one that hangs.
    """

    def __init__(
        self,
        limits: settings.Watchdog,
        phases: Phases,
        stacks: Path,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if self._rank != 0:  # only rank 0, which sees all ranks, can distinguish hung ranks from waiting ones
            limits = limits.model_copy(update={"hung_after_s": math.inf, "slow_after_s": math.inf})
        self._limits = limits
        self._phases = phases
        self._stacks = stacks
        self._on_verdict = on_verdict
        self._main = threading.main_thread().ident
        self._last_message: Message | None = None

    def __enter__(self) -> Watchdog:
        """Raises LayoutError if a rank cannot reach rank 0."""
        self._channel = connect()
        watched = range(self._world_size) if self._rank == 0 else [0]
        self._health = RankHealth(watched, self._limits, time.monotonic())
        self._loop = asyncio.SelectorEventLoop(_InBatches())
        self._wake = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            self._send_last({"left": True})
            return
        if lost_a_peer(error):
            # The watchdog's thread will name that rank and end this process. Otherwise, the exception is reported.
            time.sleep(self._limits.dead_after_s + 2 * self._limits.beat_every_s + LAST_ACTS_S)
        self._send_last({"failed": in_one_line(error), "exit_code": exit_code_of(error)})

    def _send_last(self, message: Message) -> None:
        self._last_message = message
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(timeout=LAST_ACTS_S if self._rank == 0 else None)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._watch())
        except Exception:  # a fault of the watchdog must not end the run
            _logger.exception("the watchdog failed; the run continues without it")

    async def _watch(self) -> None:
        await self._channel.open(self._on_message, self._on_disconnect)
        every, pauses = pauses_between_heartbeats(self._limits, self._world_size), 0
        while self._last_message is None:
            heartbeat = {"report": asdict(self._report())}
            if pauses % every == 0:
                self._channel.send(heartbeat)
            if self._rank == 0:
                self._on_message(0, heartbeat)
            if verdict := self._health.judge(time.monotonic()):
                await self._announce(verdict)
            await self._pause()
            pauses += 1
        self._channel.send(self._last_message)
        while self._rank != 0 and self._health.watches_others and self._health.judge(time.monotonic()) is None:
            await self._pause()
        self._channel.close()

    async def _pause(self) -> None:
        """Waits until the next heartbeat is due, or a message must be acted on."""
        began = time.monotonic()
        await self._woken(self._limits.beat_every_s)
        overslept = time.monotonic() - began - self._limits.beat_every_s
        if overslept > self._limits.beat_every_s:
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

    def _report(self) -> RankReport:
        state = self._phases.state
        function, waiting = innermost(sys._current_frames().get(self._main or 0))
        return RankReport(
            node=log.node(),
            step=state.step,
            phase=state.phase,
            phase_s=round(time.monotonic() - state.since, 1),
            entered=state.entered,
            at=function,
            waiting=waiting,
        )

    async def _announce(self, verdict: Verdict) -> None:
        """Ends the process, unless the main thread ends by itself within the verdict's grace."""
        if self._rank == 0:
            self._channel.send({"verdict": asdict(verdict)})
        deadline = time.monotonic() + verdict.grace_s
        while self._last_message is None and (left_s := deadline - time.monotonic()) > 0:
            await self._woken(left_s)
        if verdict.grace_s and self._last_message is not None:
            return
        self._channel.close()
        acts = threading.Thread(target=self._last_acts, args=(verdict,), daemon=True)
        acts.start()
        acts.join(LAST_ACTS_S)
        os._exit(verdict.exit_code)

    def _last_acts(self, verdict: Verdict) -> None:
        _logger.error("%s", verdict.text)
        if self._rank == min({*range(self._world_size)} - {verdict.rank}, default=0):
            self._on_verdict(verdict)
        self._stacks.mkdir(parents=True, exist_ok=True)
        with (self._stacks / f"rank_{self._rank:05d}.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)
        logging.shutdown()
        sys.stdout.flush()


def pauses_between_heartbeats(limits: settings.Watchdog, ranks: int) -> int:
    """Rank 0 hears some 100 heartbeats a second, however many ranks; of each, two before it is given up."""
    return max(1, int(min(ranks / 100, limits.dead_after_s / 2) // limits.beat_every_s))


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception may be only the consequence of another rank's end, or of a message that never came."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))


def innermost(frame: FrameType | None) -> tuple[str, bool]:
    """A thread's innermost function, as "function (file:line)", and whether it waits for other ranks."""
    if frame is None:
        return "nowhere", False
    path = Path(frame.f_code.co_filename)
    waits = any(room in path.as_posix() for room in _WAITING_IN)
    return f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})", waits


# --- The channel: each rank is connected to rank 0, so that the loss of a process is noticed immediately -------------


def connect() -> Channel:
    """This rank's end of the channel; every rank must call it. Raises LayoutError if one cannot reach rank 0."""
    rank = dist.get_rank()
    listener = _listener() if rank == 0 else None
    port = 0 if listener is None else int(listener.getsockname()[1])
    token, port = broadcast_from_rank0(lambda: (secrets.token_hex(16), port))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")  # where torch found rank 0
    return Channel(run_on_all_ranks(lambda: listener or _call(address, port, rank, token)), rank, token)


def _listener() -> socket.socket:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # often 1,024 files, fewer than connections
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=BACKLOG)


def _call(address: str, port: int, rank: int, token: str) -> socket.socket:
    try:
        caller = socket.create_connection((address, port), timeout=CONNECT_S)
        caller.sendall(_line({"rank": rank, "token": token}))
    except OSError as error:
        raise LayoutError(
            f"{node()} cannot reach rank 0 at {address}, port {port} ({error}), although the process group connected; "
            "open net.ipv4.ip_local_port_range between the nodes, which gloo and NCCL need too"
        ) from None
    return caller


class Channel:
    """A rank's end of the channel. Only the thread of its event loop may use it."""

    def __init__(self, own: socket.socket, rank: int, token: str) -> None:
        """`own` listens on rank 0, and is connected to rank 0 on the others."""
        self._own, self._rank, self.token = own, rank, token
        self.peers: dict[int, asyncio.Transport] = {}

    async def open(self, on_message: Callable[[int, Message], None], on_disconnect: Callable[[int], None]) -> None:
        """Starts to receive: calls `on_message` with a rank and its message, `on_disconnect` when its end is gone."""
        self.on_message, self.on_disconnect = on_message, on_disconnect
        loop = asyncio.get_running_loop()
        if self._rank == 0:
            self._server = await loop.create_server(lambda: _Connection(self, None), sock=self._own, backlog=BACKLOG)
        else:
            await loop.create_connection(lambda: _Connection(self, 0), sock=self._own)

    def send(self, message: Message) -> None:
        """Sends a message: rank 0 to all others, they to rank 0."""
        line = _line(message)
        for transport in self.peers.values():
            transport.write(line)

    def close(self) -> None:
        """Closes the connections; pending messages are sent before."""
        if self._rank == 0:
            self._server.close()
        for transport in self.peers.values():
            transport.close()


class _InBatches(selectors.DefaultSelector):
    """Takes messages together that come within a twentieth of a second: to wake costs rank 0 more than a message."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if ready and timeout != 0:
            time.sleep(0.05)
            ready = super().select(0)
        return ready


class _Connection(asyncio.Protocol):
    """A connection to `rank`, None until it has greeted. No stream: thousands would cost rank 0 too much."""

    def __init__(self, channel: Channel, rank: int | None) -> None:
        self._channel, self._rank, self._rest = channel, rank, b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._rank is not None:
            self._channel.peers[self._rank] = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE or not all(map(self._received, lines)):
            self._transport.abort()

    def _received(self, line: bytes) -> bool:
        """Whether a line is a message of one of our ranks."""
        try:
            message = json.loads(line)
        except ValueError:
            return False
        if not isinstance(message, dict):
            return False
        if self._rank is not None:
            self._channel.on_message(self._rank, message)
        elif message.get("token") == self._channel.token:
            self._rank = int(message["rank"])
            self._channel.peers[self._rank] = self._transport
        return self._rank is not None

    def connection_lost(self, error: Exception | None) -> None:
        if self._rank is not None:
            del self._channel.peers[self._rank]
            self._channel.on_disconnect(self._rank)


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
