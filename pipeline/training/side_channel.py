"""Lines between the first rank and every other, beside the training's collectives, which may be what hangs.

The first rank listens; each other one holds a connection to it, so that a process that is killed is missed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from pipeline.errors import LayoutError
from pipeline.log import node
from pipeline.training.unison import from_first_rank, in_unison

CONNECT_S = 30.0
_LONGEST_LINE = 2**16

Message = dict[str, Any]
Hear = Callable[[int, Message], None]
"""Takes a rank and what it said."""
Lose = Callable[[int], None]
"""Takes a rank whose connection broke."""


class Channel(Protocol):
    """One rank's end. All but its making belongs to the thread of one event loop."""

    async def open(self, hear: Hear, lose: Lose) -> None:
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
    token, port = from_first_rank(lambda: (secrets.token_hex(16), port))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")  # where the first rank was found before
    caller = in_unison(lambda: None if rank == 0 else _call(address, port, rank, token))
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

    async def open(self, hear: Hear, lose: Lose) -> None:
        """See `Channel`."""
        self._hear, self._lose = hear, lose
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
            self._hear(rank, message)
        del self._writers[rank]
        writer.close()
        self._lose(rank)


class Spoke:
    """Every other rank's end."""

    def __init__(self, caller: socket.socket) -> None:
        self._caller = caller

    async def open(self, hear: Hear, lose: Lose) -> None:
        """See `Channel`."""
        reader, self._writer = await asyncio.open_connection(sock=self._caller, limit=_LONGEST_LINE)
        self._listening = asyncio.create_task(self._listen(reader, hear, lose))

    def send(self, message: Message) -> None:
        """See `Channel`."""
        if not self._writer.is_closing():
            self._writer.write(_line(message))

    async def close(self) -> None:
        """See `Channel`."""
        self._listening.cancel()
        await _hang_up(self._writer)

    async def _listen(self, reader: asyncio.StreamReader, hear: Hear, lose: Lose) -> None:
        while message := await _read(reader):
            hear(0, message)
        self._writer.close()
        lose(0)


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
