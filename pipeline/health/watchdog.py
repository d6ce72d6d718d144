"""Ends a run within seconds when a rank is lost, hangs or fails, with one line that names the rank.

Each rank has a thread that sends heartbeats to rank 0 and receives rank 0's. Rank 0 judges all ranks; the others judge
rank 0. The messages are lines of JSON over TCP, because a collective may be what hangs. torch's own watchdogs only time
out, without the name of the missing rank: docs/adr/0011-one-job-a-run-folder.md.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pipeline import log
from pipeline.config import run as settings
from pipeline.errors import LayoutError, exit_code_of, in_one_line
from pipeline.health.liveness import INTERRUPTION, Phases, RankHealth, RankReport, Verdict
from pipeline.log import node
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks

LAST_ACTS_S = 5.0
"""Limit for writing the stacks and the log, since the disk may hang too."""
CONNECT_S = 30.0
BACKLOG = 4096  # all ranks connect at once
_POLL_S = (
    0.05  # rank 0 takes the messages of thousands together: to wake costs more than to read one
)
_WAITING_IN = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/deepspeed/",
    "/pipeline/parallel/ranks.py",
)
_LONGEST_LINE = 2**16
_logger = log.get_logger(__name__)

Message = dict[str, Any]
_INTERRUPTED: Message = {"interrupted": True}


class Watchdog:
    """While it is entered, this rank is watched. Every rank must enter it.

    When a rank is lost, hangs or fails, every other rank logs one line, writes the stacks of its threads into `stacks`
    and exits immediately with the verdict's exit code. The lowest rank not at fault calls `on_verdict` before.
    So do all ranks soon after `is_interrupted` says that the user wants an end without a save, whatever their main
    threads do.
    No rank leaves before rank 0, which may have more to end; so no launcher takes rank 0 for one that hangs.
    """

    def __init__(
        self,
        limits: settings.WatchdogSettings,
        phases: Phases,
        stacks: Path,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        if (
            self._rank != 0
        ):  # only rank 0, which sees all ranks, can distinguish hung ranks from waiting ones
            limits = limits.model_copy(update={"hung_after_s": math.inf, "slow_after_s": math.inf})
        self._limits, self._phases, self._stacks, self._on_verdict = (
            limits,
            phases,
            stacks,
            on_verdict,
        )
        self._is_interrupted = is_interrupted
        self._main = threading.main_thread().ident
        self._last_message: Message | None = None

    def __enter__(self) -> Watchdog:
        """Raises LayoutError if a rank cannot reach rank 0."""
        self._channel = connect()
        watched = range(self._world_size) if self._rank == 0 else [0]
        self._health = RankHealth(watched, self._limits, time.monotonic())
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            # Not "left": the others may be in a collective that this rank will never join, and have to end too.
            self._send_last(_INTERRUPTED)
            return
        if not isinstance(error, Exception):
            self._send_last({"left": True})
            return
        if lost_a_peer(error):
            # The watchdog's thread will name that rank and end this process. Otherwise, the exception is reported.
            time.sleep(self._limits.dead_after_s + 2 * self._limits.beat_every_s + LAST_ACTS_S)
        self._send_last({"failed": in_one_line(error), "exit_code": exit_code_of(error)})

    def _send_last(self, message: Message) -> None:
        self._last_message = message
        self._thread.join(timeout=LAST_ACTS_S if self._rank == 0 else None)

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # a fault of the watchdog must not end the run
            _logger.exception("the watchdog failed; the run continues without it")

    def _watch(self) -> None:
        pause_s = heartbeat_interval_s(self._limits, 1 if self._rank == 0 else self._world_size)
        while self._last_message is None:
            heartbeat = {"report": asdict(self._report())}
            self._channel.send(heartbeat)
            if self._rank == 0:
                self._health.on_message(0, heartbeat, time.monotonic())
            if verdict := self._health.judge(time.monotonic()):
                self._announce(verdict)
            next_beat = time.monotonic() + pause_s
            while (
                self._last_message is None
                and not self._health.verdict
                and time.monotonic() < next_beat
            ):
                self._poll()
        self._channel.send(self._last_message)
        while (
            self._rank != 0
            and not self._health.all_left
            and not self._health.judge(time.monotonic())
        ):
            self._poll()
        self._channel.close()

    def _poll(self) -> None:
        """Waits a moment, and takes what has come meanwhile."""
        began = time.monotonic()
        time.sleep(_POLL_S)
        if (paused_s := time.monotonic() - began) > self._limits.beat_every_s:
            self._health.extend_deadline(paused_s)
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
        at, waiting = innermost(sys._current_frames().get(self._main or 0))
        phase_s = round(time.monotonic() - state.since, 1)
        return RankReport(node(), state.step, state.phase, phase_s, state.entered, at, waiting)

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


def heartbeat_interval_s(limits: settings.WatchdogSettings, ranks: int) -> float:
    """Rank 0 hears some 100 heartbeats a second, however many ranks; of each, two before it is given up."""
    return max(limits.beat_every_s, min(ranks / 100, limits.dead_after_s / 2))


def lost_a_peer(error: BaseException) -> bool:
    """Whether an exception may be only the consequence of another rank's end, or of a message that never came."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return type(error) is RuntimeError and any(
        word in str(error) for word in ("gloo", "NCCL", "Connection closed")
    )


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
    return Channel(
        run_on_all_ranks(lambda: listener or _call(address, port, rank, token)), rank, token
    )


def _listener() -> socket.socket:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # often 1,024 files, fewer than connections
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
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


@dataclass
class _Peer:
    """A connection; `rank` is None until it has greeted, `rest` the beginning of a line."""

    connection: socket.socket
    rank: int | None
    rest: bytes = b""


class Channel:
    """A rank's end of the channel. Nothing that it does waits; only one thread may use it."""

    def __init__(self, own: socket.socket, rank: int, token: str) -> None:
        """`own` listens on rank 0, and is connected to rank 0 on the others."""
        self._own, self._token = own, token
        self.peers: dict[int, _Peer] = {}
        self._ready = selectors.DefaultSelector()
        if rank == 0:
            own.setblocking(False)
            self._ready.register(own, selectors.EVENT_READ)
        else:
            self._add(own, 0)

    def send(self, message: Message) -> None:
        """Sends a message: rank 0 to all others, they to rank 0."""
        line = _line(message)
        for peer in self.peers.values():
            with contextlib.suppress(
                OSError
            ):  # it is gone, which `receive` tells, or has not read for long
                peer.connection.send(line)

    def receive(self) -> Iterator[tuple[int, Message | None]]:
        """What has come: a rank and its message, or None when its end of the connection is gone."""
        for key, _ in self._ready.select(0):
            if key.data is None:
                with contextlib.suppress(OSError):  # none waits, or it is gone already
                    while True:
                        self._add(self._own.accept()[0], None)
            else:
                yield from self._read(key.data)

    def close(self) -> None:
        """Ends the connections. Closing one with unread messages resets it, perhaps before what was sent arrives."""
        self._ready.close()
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        peer = _Peer(connection, rank)
        self._ready.register(connection, selectors.EVENT_READ, peer)
        if rank is not None:
            self.peers[rank] = peer

    def _read(self, peer: _Peer) -> Iterator[tuple[int, Message | None]]:
        try:
            data = peer.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:  # a connection that broke has nothing more to say
            data = b""
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        try:
            for line in lines:
                message = json.loads(line)
                if peer.rank is not None:
                    yield peer.rank, message
                elif message["token"] == self._token:
                    peer.rank = int(message["rank"])
                    self.peers[peer.rank] = peer
        except (ValueError, TypeError, KeyError, RecursionError):  # not of one of our ranks
            data = b""
        if not data or len(peer.rest) > _LONGEST_LINE or (lines and peer.rank is None):
            self._ready.unregister(peer.connection)
            peer.connection.close()
            if peer.rank is not None:
                del self.peers[peer.rank]
                yield peer.rank, None


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
