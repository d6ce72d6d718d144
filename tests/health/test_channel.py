"""The channel of the watchdog: who may speak on it, what arrives, and whose end is reported."""

from __future__ import annotations

import json
import socket

import pytest

from pipeline.health.channel import Channel, encode, listen
from tests.waiting import wait_until

TOKEN = "secret"


@pytest.fixture
def listener():
    with listen() as own:
        yield own


@pytest.fixture
def rank0(listener):
    return Channel(listener, 0, TOKEN)


def connection(listener: socket.socket) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.getsockname()[1]))


def joined(listener: socket.socket, rank0: Channel, rank: int) -> Channel:
    """The end of `rank`, once rank 0 knows it."""
    own = connection(listener)
    own.sendall(encode({"rank": rank, "token": TOKEN}))
    assert wait_until(lambda: not list(rank0.receive()) and rank in rank0.peers, every_s=0.01)
    return Channel(own, rank, TOKEN)


def received(channel: Channel) -> list[tuple[int, object]]:
    """What arrives first."""
    messages: list[tuple[int, object]] = []

    def has_arrived() -> bool:
        messages.extend(channel.receive())
        return bool(messages)

    assert wait_until(has_arrived, every_s=0.01)
    return messages


def test_messages_arrive_with_the_rank_of_their_sender(listener, rank0):
    first = joined(listener, rank0, 1)
    second = joined(listener, rank0, 2)
    second.send({"report": 5})
    assert received(rank0) == [(2, {"report": 5})]
    rank0.send({"verdict": "end"})
    assert received(first) == [(0, {"verdict": "end"})]
    assert received(second) == [(0, {"verdict": "end"})]


def test_the_end_of_a_connection_is_reported_after_its_last_message(listener, rank0):
    first = joined(listener, rank0, 1)
    first.send({"left": True})
    first.close()
    messages = received(rank0)
    if len(messages) == 1:
        messages += received(rank0)
    assert messages == [(1, {"left": True}), (1, None)]
    assert not rank0.peers


STRANGERS = {
    "another token": encode({"rank": 1, "token": "guessed"}),
    "no JSON": b"GET / HTTP/1.1\r\n\n",
    "no object": b"[1]\n",
    "nesting": b"[" * 50_000 + b"\n",
    "a line without end": b"x" * 200_000,
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_no_rank_and_is_cut_off(listener, rank0, data):
    stranger = connection(listener)
    stranger.settimeout(10)
    stranger.sendall(data)

    def is_cut_off() -> bool:
        assert not list(rank0.receive())
        try:
            stranger.setblocking(False)
            return stranger.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    assert wait_until(is_cut_off, every_s=0.01)
    assert not rank0.peers


def test_a_line_may_arrive_in_parts(listener, rank0):
    own = connection(listener)
    own.sendall(encode({"rank": 1, "token": TOKEN}))
    line = json.dumps({"report": "long"}).encode() + b"\n"
    own.sendall(line[:5])
    assert wait_until(lambda: not list(rank0.receive()) and 1 in rank0.peers, every_s=0.01)
    own.sendall(line[5:])
    assert received(rank0) == [(1, {"report": "long"})]
