"""What the system says of a tcp address where nobody is met: libzmq only tells that it tries again."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

PROBE_S = 2.0
"""How long one plain connection attempt may take."""


def objection(endpoint: str) -> str | None:
    """Why no connection can be made, in the system's words; None where one can, or where nothing at all is answered."""
    parts = urlsplit(endpoint)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), PROBE_S).close()
    except TimeoutError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def unreachable(endpoint: str, why: str = "nobody has answered there yet") -> str:
    """What people read, and what they should look at."""
    return (
        f"no engine can be reached at {endpoint}: {why}; check that it runs, that transport.zmq.advertise_host (or host) of the "
        "engine is a name or address of its host as seen from here, and that no firewall is between"
    )
