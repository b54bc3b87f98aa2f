"""What can be set for the redis transport."""

import re
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from tllm_core.errors import ConfigError

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=3600)]

DEFAULT_URL = "redis://127.0.0.1:6379/0"
WORD = re.compile(r"(?=.{1,128}\Z)[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
"""What may stand in a key."""


class RedisSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both ends read these.

    url: redis://, rediss:// (TLS) or unix://; None = the local server for an engine, the engine's own for a frontend.
    username, password: win over those in `url`. db: wins over the one in `url`.
    tls_ca_file: what the server's certificate is checked against; None = the system's. tls_cert_file, tls_key_file: this side's.
    prefix: what all keys start with. connect_timeout_s: how long `listen` and `connect` wait for the server.
    answer_timeout_s: how long a command may take before the connection counts as lost. reconnect_s: pause between attempts.
    ttl_s: keys vanish so long after the last sign of life of their owner. block_s: how long one read waits at the server.
    linger_s: how long `close` keeps sending what was taken.
    queue_frames, queue_bytes: what waits in this process for one receiver, before the sender gets PortFull; as many frames may
    wait for it at the server.
    """

    url: str | None = None
    username: str | None = None
    password: str | None = None
    db: Annotated[int, Meta(ge=0)] | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    prefix: str = "tllm"
    connect_timeout_s: Seconds = 5.0
    answer_timeout_s: Seconds = 5.0
    reconnect_s: Annotated[float, Meta(gt=0, le=60)] = 0.1
    ttl_s: Annotated[float, Meta(ge=0.5, le=86400)] = 30.0
    block_s: Annotated[float, Meta(ge=0.01, le=5)] = 0.2
    linger_s: Annotated[float, Meta(ge=0, le=60)] = 0.5
    queue_frames: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    queue_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)] = 64 << 20
    max_frame_bytes: Annotated[int, Meta(ge=1 << 12, le=256 << 20)] = 2 << 20

    def __post_init__(self) -> None:
        if WORD.fullmatch(self.prefix) is None:
            raise ConfigError("prefix may hold up to 128 letters, digits, '_', '-' and single dots between them")
        if self.url is not None:
            check_url(self.url)

    def __repr__(self) -> str:
        return f"RedisSettings(prefix={self.prefix!r}, url and credentials not shown)"

    @property
    def ttl_ms(self) -> int:
        return int(self.ttl_s * 1000)

    @property
    def beat_s(self) -> float:
        """How often keys are kept alive."""
        return self.ttl_s / 10


def check_url(url: str) -> None:
    """Raises ConfigError, without the URL, as it may hold a password."""
    if "," in url.rpartition("@")[2]:
        raise ConfigError("url names several servers; redis takes one")
    try:
        parts = urlsplit(url)
        port_is_wrong = parts.port == 0
    except ValueError:
        raise ConfigError("url is none; write user and password in it with %-escapes") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError("url must start with redis://, rediss:// or unix://")
    if parts.scheme == "unix":
        return
    if not parts.hostname or port_is_wrong:
        raise ConfigError("url must be redis://host:port/db")
    if (number := parts.path.strip("/")) and not number.isdecimal():
        raise ConfigError("url must end with the number of a database, or with none")
