"""One connection to the server: commands in, replies out, one thread, no retries.

redis-py's clients repeat a command whose reply was lost, which writes an entry twice. So this uses its connections directly:
what becomes of a command is decided by who sent it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from tllm_core.errors import ConfigError, TransportError
from tllm_core.transports.redis.settings import DEFAULT_URL, RedisSettings

Command: TypeAlias = Sequence[Any]

FOREVER = float("inf")
LOST = (RedisError, OSError)
"""What a connection that is of no more use raises."""
STRIPPED = {OutOfMemoryError: "OOM ", ReadOnlyError: "READONLY ", NoPermissionError: "NOPERM "}
"""Words of the server that people look for, and that redis-py leaves out of its errors."""


class Connection:
    """One connection, opened once and never again. `shut` may be called from any thread, the rest from one at a time."""

    def __init__(self, link: Any) -> None:
        self._link = link  # redis-py's; much of it is untyped
        self._ended = False

    def open(self, answer_timeout_s: float) -> None:
        """Connects and logs in; from then on, an answer may take that long."""
        self._link.connect()
        self.allow(answer_timeout_s)

    def allow(self, answer_timeout_s: float) -> None:
        """From now on, an answer may take that long."""
        self._link._sock.settimeout(answer_timeout_s)

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """Sends all at once and returns their replies; what the server refused is a ResponseError among them.

        Raises one of LOST where the connection is lost or silent for too long: then nobody knows what was done.
        """
        if self._ended:
            raise ConnectionAbortedError("the connection was ended by this side")
        self._link.send_packed_command(self._link.pack_commands(commands), check_health=False)
        return [self._reply() for _ in commands]

    def call(self, *command: Any) -> Any:
        """The reply to one command. Raises ResponseError where the server refuses it, else as `run`."""
        return done(self.run([command]))[0]

    def transact(self, *commands: Command) -> list[Any] | None:
        """The replies to commands that the server runs as one; None, and nothing done, where what was watched has changed.

        Raises ResponseError where the server refuses any of them, else as `run`.
        """
        replies = done(self.run([("MULTI",), *commands, ("EXEC",)]))[-1]
        return None if replies is None else done(replies)

    def _reply(self) -> Any:
        try:
            return self._link.read_response()
        except ResponseError as error:
            return error

    def shut(self) -> None:
        """Ends a call that is blocked, and every later one."""
        self._ended = True
        sock = self._link._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the descriptor; in a forked child, only that."""
        self._ended = True
        self._link.disconnect()


def done(replies: list[Any]) -> list[Any]:
    """The replies, none of which is an error. Raises the first that is."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


class Dialer:
    """Knows where the server is and how to log in. Shows neither the password nor the user in anything it says."""

    def __init__(self, settings: RedisSettings, url: str | None = None) -> None:
        self._settings = settings
        self._url = settings.url or url or DEFAULT_URL
        self.where = public_url(self._url, settings.db)
        self._options = _options(settings, self._url)

    def dial(self, blocks_s: float = 0.0, at_most_s: float = FOREVER) -> Connection:
        """A new open connection for commands that block up to `blocks_s`. Raises one of LOST.

        at_most_s: how long connecting, and then each answer, may take where that is less than the settings allow.
        """
        settings = self._settings
        connect_s = min(settings.connect_timeout_s, at_most_s)
        options = self._options | {"socket_timeout": connect_s}
        if "socket_connect_timeout" in options:
            options["socket_connect_timeout"] = connect_s
        connection = Connection(ConnectionPool(**options).make_connection())
        try:
            connection.open(min(settings.answer_timeout_s + blocks_s, at_most_s))
        except BaseException:
            connection.close()
            raise
        return connection

    def dial_patiently(self) -> Connection:
        """As `dial`, to a server that may be starting just now: one that is not there, or still loads what it had saved, is
        tried again until `connect_timeout_s` is over. Raises one of LOST."""
        settings = self._settings
        deadline = time.monotonic() + settings.connect_timeout_s
        while True:
            try:
                return self._dial_served(deadline - time.monotonic())
            except LOST as error:
                left_s = deadline - time.monotonic()
                if not _may_pass(error) or left_s <= 0:
                    raise
            # There is nothing to wait for that tells when a server listens.
            time.sleep(min(settings.reconnect_s, left_s))

    def _dial_served(self, at_most_s: float) -> Connection:
        """Once commands are served: a server that loads takes connections, too."""
        connection = self.dial(at_most_s=max(at_most_s, self._settings.reconnect_s))
        try:
            connection.call("PING")
            connection.allow(self._settings.answer_timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def refusal(self, error: BaseException) -> TransportError:
        """What people read when the server can't be used."""
        if isinstance(error, AuthenticationError):
            advice = "; check transport.redis.username and transport.redis.password"
        elif isinstance(error, NoPermissionError):
            advice = f"; the user needs its keys {self._settings.prefix}:* and commands on strings and streams"
        elif isinstance(error, ResponseError):
            advice = ""
        elif urlsplit(self._url).scheme == "rediss" and isinstance(error, TimeoutError | RedisTimeoutError):
            advice = (
                f"; it took the connection or the host is silent, and no TLS came of it within "
                f"{self._settings.connect_timeout_s:g} s: does it speak TLS there? redis:// is without"
            )
        else:
            advice = "; is it running, and is transport.redis.url right?"
        return TransportError(f"the redis server {self.where} can't be used: {in_words(error)}{advice}")


def _may_pass(error: BaseException) -> bool:
    """Whether the same may go well a moment later: nobody listens, nobody answers, or the server still loads."""
    if isinstance(error, AuthenticationError | AuthorizationError | ResponseError):
        return False
    return not isinstance(error.__cause__ or error.__context__, ssl.SSLError)


def in_words(error: BaseException) -> str:
    """An error in one line, to which more can be added."""
    return " ".join(str(error).split())[:300].rstrip(".;") or type(error).__name__


def refused_in_words(error: BaseException) -> str:
    """The same for a command that a server refused which is there and answers."""
    code = next((code for kind, code in STRIPPED.items() if isinstance(error, kind)), "")
    return f"the redis server refuses what it is asked: {code}{in_words(error)}"


def public_url(url: str, db: int | None = None) -> str:
    """The URL without user and password. Raises ConfigError for one that is none of redis."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - looks whether it is a number
    except ValueError:  # its text shows parts of the URL, which may be parts of a password
        raise ConfigError("transport.redis.url is no URL; write user and password with %-escapes") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"transport.redis.url must start with redis://, rediss:// or unix://, not {parts.scheme[:20]!r}"
        )
    in_query = parse_qs(parts.query).get("db", [""])[0]
    if parts.scheme == "unix":
        number = str(db) if db is not None else in_query
        return f"unix://{parts.path}" + (f"?db={number}" if number else "")
    number = str(db) if db is not None else in_query or parts.path.strip("/") or "0"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{number}"


def _check_readable(settings: RedisSettings) -> None:
    """Raises ConfigError, which names setting and file: redis-py tells of a file as if it were the connection."""
    for name in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
        path = getattr(settings, name)
        try:
            if path is not None:
                with open(path, "rb"):
                    pass
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            raise ConfigError(f"transport.redis.{name}: {path} can't be read: {what}") from None


def _options(settings: RedisSettings, url: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigError("transport.redis.url is wrong: an option or the number of the database") from None
    for name in ("username", "password", "db"):
        if (value := getattr(settings, name)) is not None:
            options[name] = value
    if urlsplit(url).scheme == "rediss":
        files = {
            "ssl_ca_certs": settings.tls_ca_file,
            "ssl_certfile": settings.tls_cert_file,
            "ssl_keyfile": settings.tls_key_file,
        }
        _check_readable(settings)
        options.update({name: path for name, path in files.items() if path is not None})
    if urlsplit(url).scheme != "unix":
        options.update(socket_connect_timeout=settings.connect_timeout_s, socket_keepalive=True)
    for name in ("socket_timeout", "retry_on_timeout", "retry_on_error", "health_check_interval", "decode_responses"):
        options.pop(name, None)
    return {**options, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
