"""What can be set for the zmq transport."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

Frames: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=60)]


class ZmqSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both ends read these; only `high_water_frames`, `linger_s`, `reconnect_s` and `max_frame_bytes` concern a frontend.

    protocol: ipc stays on this host and with this user.
    host: what tcp binds; loopback unless told otherwise. port: 0 = any free one.
    advertise_host: what frontends are told to connect to; None = `host`, or this host's name where that is a wildcard.
    directory: of sockets and name locks; None = a private one under $XDG_RUNTIME_DIR or the temporary directory.
    high_water_frames: frames per peer and direction that wait in memory before the sender gets PortFull.
    linger_s: how long `close` keeps sending what was taken. reconnect_s: the first pause before another attempt.
    name_timeout_s: how long `listen` waits for its turn to take a name.
    """

    protocol: Literal["ipc", "tcp"] = "ipc"
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    advertise_host: str | None = None
    directory: str | None = None
    high_water_frames: Frames = 4096
    max_frame_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 32)] = 256 << 20
    linger_s: Seconds = 0.5
    reconnect_s: Annotated[float, Meta(gt=0, le=60)] = 0.02
    name_timeout_s: Seconds = 2.0
