"""Whether a server is one that frames may be trusted to."""

from __future__ import annotations

import logging
import re

from redis.exceptions import ResponseError

from tllm_core.errors import TransportError
from tllm_core.transports.redis.connection import Connection

log = logging.getLogger("tllm_core")

OLDEST = (6, 2)
KEEPS_ALL = "noeviction"


def check_server(connection: Connection, where: str, max_frame_bytes: int) -> None:
    """Raises TransportError for a server that is too old, takes no frame of that size, or drops keys when its memory is full.

    What the server doesn't tell this user is not known, and is said once in the log.
    """
    facts = _facts(connection)
    version = facts.get("redis_version", "")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST:
        raise TransportError(f"the redis server {where} is version {version}; tllm needs 6.2 or later, or Valkey")
    largest = _setting(connection, "proto-max-bulk-len")
    if largest is not None and int(largest) < max_frame_bytes:
        raise TransportError(
            f"the redis server {where} takes values of {largest} bytes at most (proto-max-bulk-len); "
            f"set transport.redis.max_frame_bytes, which is {max_frame_bytes}, to no more than that, for frontends too"
        )
    policy = _setting(connection, "maxmemory-policy") or facts.get("maxmemory_policy")
    if policy is None:
        log.warning("the redis server %s does not tell its maxmemory-policy; it must be noeviction", where)
    elif policy != KEEPS_ALL:
        raise TransportError(
            f"the redis server {where} drops keys when its memory is full (maxmemory-policy {policy}): "
            "frames would be lost; have it set to noeviction, or use another server"
        )


def _facts(connection: Connection) -> dict[str, str]:
    """INFO's lines; nothing where it is forbidden."""
    try:
        raw = connection.call("INFO")
    except ResponseError:
        return {}
    lines = bytes(raw).decode("utf-8", "replace").splitlines()
    return {name: value for name, found, value in (line.partition(":") for line in lines) if found}


def _setting(connection: Connection, name: str) -> str | None:
    try:
        pair = connection.call("CONFIG", "GET", name)
    except ResponseError:
        return None
    return bytes(pair[1]).decode("utf-8", "replace") if len(pair) == 2 else None
