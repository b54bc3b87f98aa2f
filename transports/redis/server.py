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


def check_server(connection: Connection, where: str) -> None:
    """Raises TransportError for a server that is too old or that drops keys when its memory is full.

    What the server doesn't tell this user is not known, and is said once in the log.
    """
    facts = _facts(connection)
    version = facts.get("redis_version", "")
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < OLDEST:
        raise TransportError(f"the redis server {where} is version {version}; tllm needs 6.2 or later, or Valkey")
    policy = _policy(connection) or facts.get("maxmemory_policy")
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


def _policy(connection: Connection) -> str | None:
    try:
        pair = connection.call("CONFIG", "GET", "maxmemory-policy")
    except ResponseError:
        return None
    return bytes(pair[1]).decode("utf-8", "replace") if len(pair) == 2 else None
