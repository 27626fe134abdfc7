"""Connections one by one, of which none is lost."""

from __future__ import annotations

import asyncio
import socket


async def accepted(listener: socket.socket) -> socket.socket:
    """The next connection, once there is one. Raises OSError.

    One that asyncio's ``sock_accept`` (3.11) has taken when it is cancelled is never closed, or ends in a traceback.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)
    connection, _ = listener.accept()
    connection.setblocking(False)
    return connection
