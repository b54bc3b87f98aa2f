"""What can be set for the unix transport."""

from typing import Annotated

from msgspec import Meta, Struct


class UnixSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """directory: of the sockets, closed to other users; None = one under $XDG_RUNTIME_DIR or the temporary directory.

    queue_bytes: what waits for one peer beyond the kernel's own buffer before its senders get PortFull.
    max_frame_bytes: in one frame at most. linger_s: how long `close` keeps sending what was taken.
    """

    directory: str | None = None
    queue_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 8 << 20
    max_frame_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 30)] = 64 << 20
    linger_s: Annotated[float, Meta(ge=0, le=60)] = 0.5
