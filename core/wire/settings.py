"""What can be set about lanes and sessions: `[wire]` in `tllm.toml`."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Bytes = Annotated[int, Meta(ge=4096, le=1 << 40)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]


class WireSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds and times of each lane; one lane is one direction of one session.

    window_frames, window_bytes: sent and not acknowledged, at most. backlog_frames, backlog_bytes: accepted and not yet
    sent, at most; beyond it submit raises Overloaded. max_message_bytes: one message; beyond it FrameTooLarge.
    ack_every_frames, ack_delay_s: a receiver acknowledges after so many frames, or so long after the first of them.
    resend_after_s, resend_max_s: back-off where a port may lose frames. probe_after_s: silence about frames in flight after which
    one is sent again also where the port claims to lose none. port_retry_s: how soon a port that was full or down
    is tried again. hello_retry_s: how often an unanswered Hello is repeated. max_half_open, half_open_s: attaches that were
    welcomed and have not spoken yet: how many, and for how long. tombstones: ended sessions whose reason is still told.
    parked_bytes, stall_after_s: what an engine keeps for a frontend that does not read, and for how long its lane may be full;
    beyond either it is expelled.
    """

    window_frames: Count = 1024
    window_bytes: Bytes = 64 * 2**20
    backlog_frames: Count = 4096
    backlog_bytes: Bytes = 64 * 2**20
    max_message_bytes: Bytes = 64 * 2**20
    ack_every_frames: Count = 32
    ack_delay_s: Seconds = 0.02
    resend_after_s: Seconds = 0.2
    resend_max_s: Seconds = 2.0
    probe_after_s: Seconds = 5.0
    port_retry_s: Seconds = 0.005
    hello_retry_s: Seconds = 0.1
    max_half_open: Count = 64
    half_open_s: Seconds = 10.0
    tombstones: Count = 4096
    parked_bytes: Bytes = 16 * 2**20
    stall_after_s: Seconds = 10.0


DEFAULT_WIRE = WireSettings()
