"""One connection to one NATS server, by nats-py, which is not asked to reconnect: after any loss there is a new client.

nats-py's client ends for good on some errors whatever its reconnect settings, keeps what was published while it was down,
and reports errors from its tasks only. One way back for every kind of loss is simpler than both.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from tllm_core.errors import ConfigError
from tllm_core.transports.nats.settings import Login, NatsSettings, split_login

PENDING_BYTES = 1 << 20
"""What nats-py collects before `publish` waits for the socket."""

CLOSE_S = 0.2
"""How long a client gets for an orderly end."""

DEAF = (OSError, nats.errors.Error, asyncio.TimeoutError, ValueError)
"""What a connection attempt or a publish may end with."""


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Raises TimeoutError where it takes longer; it may go on for a while then.

    asyncio.timeout would trust that a cancellation ends it, and nats-py swallows the one that finds it waiting for room.
    """
    task = asyncio.create_task(work)
    done, _ = await asyncio.wait([task], timeout=seconds)
    if not done:
        task.cancel()
        raise TimeoutError
    task.result()


async def end(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancels them until they are done."""
    while tasks:
        for task in tasks:
            task.cancel()
        done, tasks = await asyncio.wait(tasks, timeout=CLOSE_S)
        await asyncio.gather(*done, return_exceptions=True)


class Lost(Exception):
    """A connection is lost or could not be made. `hopeless`: trying again without a change of something is of no use."""

    def __init__(self, reason: str, *, hopeless: bool = False) -> None:
        super().__init__(reason)
        self.hopeless = hopeless


class Connection:
    """A connected client and how it ended. All methods belong to its event loop.

    `lost`: done once the connection is of no more use; its result says why. `dropped`: called when nats-py dropped a frame.
    attempt_s: how long `open` may take.
    """

    def __init__(
        self, settings: NatsSettings, url: str, prefix: str, dropped: Callable[[], None], attempt_s: float
    ) -> None:
        self.url, login = split_login(url)
        self.client = Client()
        self.lost: asyncio.Future[Lost] = asyncio.get_running_loop().create_future()
        self._settings, self._prefix, self._dropped, self._attempt_s = settings, prefix, dropped, attempt_s
        self._login = login or Login(settings.user, settings.password, settings.token)
        self._wants_tls = settings.wants_tls or url.startswith("tls://")
        self._inbox = f"{prefix}._INBOX"
        self._echo_subject = f"{self._inbox}.{secrets.token_hex(11)}"
        self._echoes: dict[bytes, asyncio.Future[None]] = {}
        self._errors: list[Exception] = []
        self._before = asyncio.all_tasks()

    async def open(self) -> None:
        """Raises Lost; in any case `close` has to be called."""
        try:
            async with asyncio.timeout(self._attempt_s):
                await self.client.connect([self.url], **self._options())
        except ConfigError as error:
            raise Lost(str(error), hopeless=True) from None
        except DEAF as error:
            raise self.as_lost(error) from None
        except Exception as error:
            login = self._settings.nkey_seed_file or self._settings.credentials_file
            if login is None:
                raise
            # The library has no error of its own for all that can be wrong in such a file, and says parts of it.
            raise Lost(f"{login} holds no login that can be used ({type(error).__name__})", hopeless=True) from None
        if self._wants_tls and not self._is_encrypted():
            raise Lost(f"{self.url} offers no TLS, which the settings ask for", hopeless=True)
        await self.subscribe(self._echo_subject, self._on_echo)

    async def close(self) -> None:
        """Ends the client, whatever state it is in, with all that runs on the loop since this connection was made."""
        if not self.lost.done():
            self.lost.set_result(Lost("closed"))
        try:
            with contextlib.suppress(*DEAF, AssertionError):
                await within(CLOSE_S, self.client.close())
        finally:
            # nats-py gives up half-way where the socket is broken or doesn't take any more.
            writer = getattr(self.client._transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()
        await end(asyncio.all_tasks() - self._before)

    async def subscribe(self, subject: str, take: Callable[[Msg], Awaitable[None]]) -> None:
        """Has `take` awaited for each message, in order."""
        limit = self._settings.receive_queue_bytes
        await self.client.subscribe(subject, cb=take, pending_msgs_limit=0, pending_bytes_limit=limit)

    async def echo(self) -> None:
        """Returns once all that was published before has passed the server, and its errors have arrived."""
        word = secrets.token_bytes(8)
        self._echoes[word] = echo = asyncio.get_running_loop().create_future()
        try:
            await self.client.publish(self._echo_subject, word)
            await echo
        finally:
            del self._echoes[word]

    async def _on_echo(self, message: Msg) -> None:
        echo = self._echoes.get(message.data)
        if echo is not None and not echo.done():
            echo.set_result(None)

    def _options(self) -> dict[str, Any]:
        settings = self._settings
        options: dict[str, Any] = {
            "name": f"tllm-core {self._prefix}",
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "connect_timeout": self._attempt_s,
            "pending_size": PENDING_BYTES,
            "inbox_prefix": self._inbox,
            "error_cb": self._on_error,
            "closed_cb": self._on_closed,
            "disconnected_cb": self._on_closed,
            "nkeys_seed": settings.nkey_seed_file,
            "user_credentials": settings.credentials_file,
            "user": self._login.user,
            "password": self._guarded(self._login.password),
            "token": self._guarded(self._login.token),
            "tls_hostname": settings.tls_hostname,
        }
        if self._wants_tls:
            options["tls"] = _tls_context(settings)
        return options

    def _guarded(self, secret: str | None) -> Callable[[], str] | None:
        """A secret that is not said in the clear where TLS was asked for; nats-py takes what the server offers."""

        def say() -> str:
            if self._wants_tls and not self._is_encrypted():
                raise nats.errors.Error("the server offers no TLS, which the settings ask for")
            return secret or ""

        return None if secret is None else say

    def _is_encrypted(self) -> bool:
        return bool(self.client._server_info.get("tls_required"))

    async def _on_error(self, error: Exception) -> None:
        """nats-py's errors of its own tasks; at most a reason is kept of those before the connection is there."""
        if isinstance(error, nats.errors.SlowConsumerError):
            self._dropped()
            return
        self._errors = [error]
        if isinstance(error, DEAF) and self.client.is_connected and not self.lost.done():
            self.lost.set_result(self.as_lost(error))

    async def _on_closed(self) -> None:
        if not self.lost.done():
            self.lost.set_result(self.as_lost(self.client.last_error or nats.errors.UnexpectedEOF()))

    def as_lost(self, error: BaseException) -> Lost:
        """The error in words that say where and what to do."""
        if isinstance(error, Lost):
            return error
        if isinstance(error, nats.errors.NoServersError) and self._errors:
            error = self._errors[-1]
        words = str(error).removeprefix("nats: ").strip("' ")
        text = words.lower()
        if isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in text:
            return Lost(f"{self.url} refuses this login ({words}); check user, password and token", hopeless=True)
        if "permissions violation" in text:
            return Lost(f"{self.url}: {words}; allow this login {self._prefix}.> there", hopeless=True)
        if isinstance(error, ssl.SSLError) or "no tls" in text:
            return Lost(f"no TLS with {self.url}: {words}", hopeless=True)
        if isinstance(error, ConnectionRefusedError):
            return Lost(f"nothing listens at {self.url}")
        if isinstance(error, nats.errors.StaleConnectionError | ConnectionResetError | BrokenPipeError):
            return Lost(f"the connection to {self.url} is lost")
        if isinstance(error, TimeoutError | asyncio.TimeoutError) and not isinstance(error, nats.errors.Error):
            return Lost(f"{self.url} did not answer within {self._attempt_s:.3g} s")
        return Lost(f"{self.url}: {words or type(error).__name__}")


def _tls_context(settings: NatsSettings) -> ssl.SSLContext:
    """Raises ConfigError for files that can't be used."""
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file)
        if settings.tls_cert_file is not None:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file)
    except OSError as error:
        raise ConfigError(f"the TLS files of the nats transport can't be used: {error}") from None
    return context
