"""What can be set for the NATS transport."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from msgspec import Meta, Struct

from tllm_core.errors import ConfigError

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=3600)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1 << 16, le=1 << 40)]

SCHEMES = ("nats", "tls")
DEFAULT_URL = "nats://127.0.0.1:4222"
SECRETS = ("password", "token")


class NatsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both ends read these. A login in `url` is used for that server and shown nowhere.

    url: one server, several separated by commas, or a list: nats://host:port, tls://host:port. None = the address that the
    engine advertises, and nats://127.0.0.1:4222 for the engine itself. The servers of a cluster are tried in turn.
    prefix: the first token(s) of every subject; a server's permissions need to allow PREFIX.> and nothing else.
    nkey_seed_file, credentials_file: logins by key; they need the package nkeys. tls_*: files in PEM format; TLS is insisted
    on where any of them is set or a url says tls://. tls_hostname: whom the certificate must name, if not the url's host.
    connect_timeout_s: how long opening a port waits for the server, and each further attempt; several servers share it.
    reconnect_s, reconnect_max_s: the pause after a failed attempt, doubled each time; attempts never end.
    probe_s: how often the path to the server is proven. stale_after_s: a connection without any sign of life for so long
    is replaced. linger_s: how long `close` keeps sending what was taken.
    send_queue_frames, send_queue_bytes: taken and not yet handed to the connection; beyond it PortFull.
    receive_queue_bytes: received and not yet read; must be more than the window of all sessions, or what comes is dropped
    and sent again. max_frame_bytes: a cap below the server's own limit.
    """

    url: str | list[str] | None = None
    prefix: Annotated[str, Meta(max_length=128)] = "tllm"
    user: str | None = None
    password: str | None = None
    token: str | None = None
    nkey_seed_file: str | None = None
    credentials_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_hostname: str | None = None
    connect_timeout_s: Seconds = 5.0
    reconnect_s: Seconds = 0.05
    reconnect_max_s: Seconds = 0.25
    probe_s: Seconds = 0.2
    stale_after_s: Seconds = 3.0
    linger_s: Annotated[float, Meta(ge=0, le=60)] = 0.5
    send_queue_frames: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    send_queue_bytes: Bytes = 64 << 20
    receive_queue_bytes: Bytes = 256 << 20
    max_frame_bytes: Bytes = 64 << 20

    def __post_init__(self) -> None:
        if self.url is not None:
            split_urls(self.url)
        if not is_prefix(self.prefix):
            raise ValueError("prefix may hold letters, digits, '_' and '-', and single dots between them")

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in (*SECRETS, "url"))
        return f"NatsSettings(url={shown_urls(self.url or DEFAULT_URL)!r}, {', '.join(shown)})"

    @property
    def wants_tls(self) -> bool:
        """Whether TLS is insisted on for all servers."""
        files = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file, self.tls_hostname)
        return any(files) or any(url.startswith("tls://") for url in split_urls(self.url or DEFAULT_URL))


class Login(NamedTuple):
    """By user and password, or by token."""

    user: str | None
    password: str | None
    token: str | None


def split_urls(urls: str | list[str]) -> list[str]:
    """One url per server. Raises ValueError, without the url, as it may hold a password."""
    parts = urls.split(",") if isinstance(urls, str) else urls
    found = [part.strip() for part in parts if part.strip()]
    for number, url in enumerate(found, start=1):
        if not _is_server(url):
            raise ValueError(f"server {number} in url is not of the form nats://host:port or tls://host:port")
    if not found:
        raise ValueError("url names no server; it should be nats://host:port")
    return found


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        return False


def shown_urls(urls: str | list[str]) -> str:
    """The same urls without what comes before an @, separated by commas."""
    return ",".join(split_login(url)[0] for url in split_urls(urls))


def split_login(url: str) -> tuple[str, Login | None]:
    """The url without its login, and the login, if there is one; a name alone is a token."""
    parts = urlsplit(url)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if parts.username is None:
        return shown, None
    if parts.password is None:
        return shown, Login(None, None, unquote(parts.username))
    return shown, Login(unquote(parts.username), unquote(parts.password), None)


def is_prefix(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", text) is not None


def checked_name(what: str, name: str) -> str:
    """A name that may become part of a subject. Raises ConfigError for one that may not."""
    if len(name) > 128 or re.fullmatch("[A-Za-z0-9_-]+", name) is None:
        raise ConfigError(
            f"the {what} {name[:80]!r} can't be used over nats: only letters, digits, '_' and '-' (at most 128) may be in it"
        )
    return name
