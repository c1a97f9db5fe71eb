"""TCP connections between the parent of a run and workers on other machines.

Both sides prove that they know the run's key, which is random for each start. Later messages are
neither authenticated nor encrypted, like all traffic of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)

_HANDSHAKE_S = 20
_SILENT_S, _PROBE_EVERY_S, _PROBES = 10, 5, 4
"""A lost machine is noticed after 30 seconds."""


def listen(host: str) -> Listener:
    """Listen on a free port of `host`."""
    return Listener((host, 0), backlog=1024)


def welcome(connection: Connection, key: bytes) -> bool:
    """Check that a peer knows `key`, and prove the same to it; False if it does not."""
    with _socket_of(connection) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE_S, 0))
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            _tune(raw)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
            return False
    return True


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Connect to a listener. Raises `OSError` or `AuthenticationError`."""
    connection: Connection = Client(address, authkey=key)
    with _socket_of(connection) as raw:
        _tune(raw)
    return connection


def hang_up(connection: Connection) -> None:
    """Shut down a connection that other threads use: they get an end of file."""
    with contextlib.suppress(OSError), _socket_of(connection) as raw:
        raw.shutdown(socket.SHUT_RDWR)


def _tune(raw: socket.socket) -> None:
    # Else the second part of a message waits for the acknowledgment of the first.
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", (_SILENT_S + _PROBE_EVERY_S * _PROBES) * 1000),
    ):
        if option := getattr(socket, name, None):  # only Linux has all of them
            raw.setsockopt(socket.IPPROTO_TCP, option, value)


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))
