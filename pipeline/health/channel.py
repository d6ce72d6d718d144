"""The watchdog's messages: lines of JSON over TCP, between rank 0 and every other rank.

Each rank has one connection to rank 0, so that the loss of a process is noticed immediately. The
messages do not use a collective, because a collective may be what hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import selectors
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pipeline.errors import LayoutError
from pipeline.log import node
from pipeline.parallel.ranks import broadcast_from_rank0, run_on_all_ranks

CONNECT_S = 30.0
BACKLOG = 4096  # all ranks connect at once
_LONGEST_LINE = 2**16

Message = dict[str, Any]


def connect() -> Channel:
    """This rank's end of the channel; every rank must call it.

    Raises:
        LayoutError: a rank cannot reach rank 0; the ranks that can raise SystemExit.
    """
    rank = dist.get_rank()
    listener: socket.socket | None = None
    port = 0
    if rank == 0:
        listener = listen()
        port = int(listener.getsockname()[1])
    # The token tells our ranks from any other program that finds the port.
    token, port = broadcast_from_rank0(lambda: (secrets.token_hex(16), port))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")  # where torch found rank 0

    def own_end() -> socket.socket:
        if listener is not None:
            return listener
        return _connect_to_rank0(address, port, rank, token)

    return Channel(run_on_all_ranks(own_end), rank, token)


def listen() -> socket.socket:
    """Rank 0's listening socket, at a free port; raises this process's limit on open files."""
    # Often 1,024 files are allowed, fewer than there are connections; the hard limit is higher.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    # The ranks connect to the address by which torch found rank 0, of either family.
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    return socket.create_server(("", 0), backlog=BACKLOG)


def _connect_to_rank0(address: str, port: int, rank: int, token: str) -> socket.socket:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
        connection.sendall(encode({"rank": rank, "token": token}))
    except OSError as error:
        raise LayoutError(
            f"{node()} cannot reach rank 0 at {address}, port {port} ({error}), although the "
            "process group connected; open net.ipv4.ip_local_port_range between the nodes, which "
            "gloo and NCCL need too"
        ) from None
    return connection


def encode(message: Message) -> bytes:
    """A message as it is sent: one line of JSON."""
    return json.dumps(message).encode() + b"\n"


@dataclass
class _Peer:
    """A connection.

    Attributes:
        rank: the rank at its other end; None until its first line has said so.
        rest: the beginning of a line whose end has not arrived yet.
    """

    connection: socket.socket
    rank: int | None
    rest: bytes = b""


class Channel:
    """A rank's end of the channel. No method blocks; only one thread may use it."""

    def __init__(self, own: socket.socket, rank: int, token: str) -> None:
        """`own` listens on rank 0, and is connected to rank 0 on the others."""
        self._own = own
        self._token = token
        self.peers: dict[int, _Peer] = {}
        self._ready = selectors.DefaultSelector()
        if rank == 0:
            own.setblocking(False)
            self._ready.register(own, selectors.EVENT_READ)
        else:
            self._add(own, 0)

    def send(self, message: Message) -> None:
        """Sends a message: from rank 0 to all others, from another rank to rank 0."""
        line = encode(message)
        for peer in self.peers.values():
            # A peer that is gone is reported by `receive`; one that reads nothing misses the line.
            with contextlib.suppress(OSError):
                peer.connection.send(line)

    def receive(self) -> Iterator[tuple[int, Message | None]]:
        """What has arrived: a rank and its message, or None where its connection has ended."""
        for key, _ in self._ready.select(0):
            if key.data is None:  # the listening socket
                self._accept_all()
            else:
                yield from self._read(key.data)

    def close(self) -> None:
        """Ends the connections, after what was sent.

        Only their sending half is closed: closing a connection with unread messages resets it,
        perhaps before what was sent arrives.
        """
        self._ready.close()
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)

    def _accept_all(self) -> None:
        with contextlib.suppress(OSError):  # no further connection waits, or it has ended already
            while True:
                connection, _ = self._own.accept()
                self._add(connection, None)

    def _add(self, connection: socket.socket, rank: int | None) -> None:
        # The watchdog must never wait for a rank that may be stopped.
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
        except OSError:  # the connection broke
            data = b""
        ended = not data
        # TCP has no messages: a line may arrive in parts, or several at once.
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        try:
            for line in lines:
                message = json.loads(line)
                if peer.rank is not None:
                    yield peer.rank, message
                elif message["token"] == self._token:
                    peer.rank = int(message["rank"])
                    self.peers[peer.rank] = peer
        except (ValueError, TypeError, KeyError, RecursionError):
            ended = True  # the line is not one of our ranks'

        did_not_identify = bool(lines) and peer.rank is None
        if ended or did_not_identify or len(peer.rest) > _LONGEST_LINE:
            yield from self._drop(peer)

    def _drop(self, peer: _Peer) -> Iterator[tuple[int, None]]:
        """Closes a connection, and reports it if it was a rank's."""
        self._ready.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            del self.peers[peer.rank]
            yield peer.rank, None
