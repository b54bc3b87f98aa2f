"""GenerationExecutor: requests in, token streams out, and nobody waits for an engine that is gone."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tllm_core.attach import (
    AttachFile,
    claim_attach_file,
    is_stopped_by_owner,
    mark_stopped,
    read_attach_file,
    write_attach_file,
)
from tllm_core.checks import Checks, default_sampling
from tllm_core.claim import Claim
from tllm_core.config import Settings, load_settings
from tllm_core.contracts.messages import (
    EngineInfo,
    GenerationRequest,
    Plain,
    TokenIds,
)
from tllm_core.contracts.values import seconds
from tllm_core.control import ControlCalls
from tllm_core.errors import (
    Cause,
    ConfigError,
    EngineDeadError,
    Overloaded,
    TllmError,
    TransportError,
)
from tllm_core.frontend import Frontend, foreign
from tllm_core.health import Health, health_of
from tllm_core.ledger.filtered import FilteredResult
from tllm_core.ledger.result import GenerationResult
from tllm_core.plan import Plan, ticket_for
from tllm_core.prompts import Params, is_one_prompt, many_prompts, per_prompt
from tllm_core.wire.link import FrontendLink
from tllm_core.wire.liveness import Liveness
from tllm_core.world.ready import OnPhase, Starting

Prompt = TokenIds | Sequence[int]

SHUTDOWN_S = 180.0
OPEN_S = 30.0
"""How long an engine that said Ready may take to answer Hello."""
MAX_BOUND_S = 1e6
"""Twelve days: poll(2) counts milliseconds in 32 bits."""


class GenerationExecutor(ControlCalls):
    """The front door of one engine generation. Make it with `create`; use it from any threads and event loops at once."""

    def __init__(self, frontend: Frontend, info: EngineInfo, settings: Settings, plan: Plan) -> None:
        self._frontend = frontend
        self._settings = settings
        self._plan = plan
        self._pid = frontend.pid
        self.info = info
        self._ticket: AttachFile | None = None
        self._claims: dict[str, Claim] = {}
        super().__init__()
        self._checks = Checks(info)
        frontend.start()
        _LIVE.add(frontend)
        self._finalizer = weakref.finalize(self, _close_from_finalizer, frontend, self._pid)
        self._finalizer.atexit = False  # at exit, `_close_all` does it, and waits
        plan.hooks.started(self)

    # ------------------------------------------------------------------------------------------------------ create

    @classmethod
    def create(
        cls,
        config: str | os.PathLike[str] | Settings | None = None,
        *,
        engine: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
        transport: str | None = None,
        transport_options: Mapping[str, Any] | None = None,
        launcher: str | None = None,
        launcher_options: Mapping[str, Any] | None = None,
        on_phase: OnPhase | None = None,
    ) -> Self:
        """Starts an engine world and returns once it is ready.

        The interpreter's exit ends it, if `shutdown` has not. Python first waits for non-daemon threads and for the tasks of
        thread pools, which have the engine until they return: one that waits without end for a request that gets no further,
        as of a paused engine, holds up the exit. `with`, or `shutdown` as the main thread's last act, ends such waits.

        `config` is a TOML file's path or Settings; keywords go before it. `on_phase` hears what start-up is doing.
        Raises ConfigError for a wrong choice or option, EngineStartError with the child's own error if it does not get ready.
        """
        choices = {
            "engine": (engine, engine_options),
            "transport": (transport, transport_options),
            "launcher": (launcher, launcher_options),
        }
        settings = load_settings(config, overrides=_overrides(choices))
        plan = Plan.of(settings)
        return cls._start(plan, settings, on_phase)

    @classmethod
    def _start(cls, plan: Plan, settings: Settings, on_phase: OnPhase | None) -> Self:
        spec = plan.world_spec(settings)
        assert plan.launcher is not None
        world = plan.launcher.launch(spec)
        link: FrontendLink | None = None
        try:
            starting = Starting(world, settings.liveness, on_phase)
            start = starting.wait()
            link = plan.connect(start.address, spec, settings)
            welcome = plan.open(link, OPEN_S, starting.look)
            liveness = None if start.watcher is None else Liveness(settings.liveness)
            frontend = Frontend(
                link,
                welcome.frontend_id,
                world,
                liveness=liveness,
                observers=plan.hooks.observers,
                mailbox_bytes=settings.ledger.mailbox_bytes,
            )
            frontend.ranks = start.ranks
        except BaseException:
            world.kill()
            if link is not None:
                link.close()
            raise
        executor = cls(frontend, welcome.info, settings, plan)
        executor._ticket = ticket_for(spec, start) if plan.can_be_shared else None
        return executor

    # ------------------------------------------------------------------------------------------------------ attach

    @classmethod
    def attach(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        config: str | os.PathLike[str] | Settings | None = None,
        transport_options: Mapping[str, Any] | None = None,
        timeout: float = OPEN_S,
    ) -> Self:
        """Connects to an engine world that somebody else started; the end of this executor leaves it alone.

        `path`: the file that its owner wrote (`tllm worker --attach-file`); None = what `[attach] file` says. Returns once the
        engine answered. Raises ConfigError for a file that can't or must not be used, Refused for another wire version,
        EngineDeadError where its processes are gone, TransportError where nobody answers within `timeout` seconds.
        """
        timeout = _bounded(timeout, ConfigError)
        path = load_settings(config).attach.file if path is None else path
        if path is None:
            raise ConfigError("no attach file is given; pass its path, or set attach.file in the config file")
        content = read_attach_file(path)
        overrides = _overrides({"transport": (content.transport, transport_options)})
        settings = load_settings(config, overrides=overrides, origins={"transport.name": os.fspath(path)})
        plan = Plan.to_attach(settings, content)
        if content.ended_by_owner:
            raise _stopped(path)
        try:
            attachment = plan.attach(content, settings, timeout)
        except (EngineDeadError, TransportError):
            if is_stopped_by_owner(path, content):
                raise _stopped(path) from None
            raise
        frontend = Frontend(
            attachment.link,
            attachment.welcome.frontend_id,
            attachment.world,
            liveness=None if attachment.world is None else Liveness(attachment.liveness),
            observers=plan.hooks.observers,
            mailbox_bytes=settings.ledger.mailbox_bytes,
        )
        frontend.ranks = content.ranks
        return cls(frontend, attachment.welcome.info, settings, plan)

    def write_attach_file(self, path: str | os.PathLike[str] | Claim) -> AttachFile:
        """Lets other processes of this user attach to the engine that this executor owns, with `attach(path)`.

        The file is this engine's until `shutdown`, which leaves it, marked: who attaches later is told that the engine was
        stopped. Raises ConfigError where the engine can't have more frontends, the file can't be written, or it belongs to
        another engine that runs or starts. A `claim_attach_file(path)` of before the start may stand for the path.
        """
        if self._ticket is None:
            raise ConfigError(
                f"nobody can attach to this engine ({self._plan.summary()}); it needs one of its own process"
            )
        where = os.path.abspath(path)
        claim = path if isinstance(path, Claim) else self._claims.get(where)
        if claim is None or not claim.is_held:
            claim = claim_attach_file(path)
        frontend = self._frontend
        claim.is_needed = lambda: frontend.world_error is None  # of a dead engine's file the next one may be made
        self._claims[where] = claim
        write_attach_file(claim, self._ticket)
        return self._ticket

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Blocks until the engine is lost or the executor is shut down; False after `timeout` seconds. `health()` says why."""
        self._check_process()
        return self._frontend.ended.wait(seconds(timeout))

    def wait_world_ended(self, timeout: float | None = None) -> bool:
        """As `wait_ended`, for whoever owns the engine: a lane to it that is lost, as over a broker that stays away, does not end
        it, and others may still attach. `world_failure` says why it ended."""
        self._check_process()
        return self._frontend.world_ended.wait(seconds(timeout))

    # ------------------------------------------------------------------------------------------------------ submit

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Takes one request, checked here. Never blocks.

        Raises RequestError (names the field), Overloaded (submit again later), EngineDeadError, TransportError,
        ExecutorClosedError, or PluginError where a plugin's hook failed; nothing was taken then.
        """
        self._check_process()
        hooks = self._plan.hooks
        request = hooks.request(request, self.info, self._frontend.ledger.in_flight)
        self._checks.check(request)
        filters = hooks.result_filters(request)
        mailbox = self._frontend.submit(request)
        return FilteredResult(request, mailbox, self, filters) if filters else GenerationResult(request, mailbox, self)

    def generate_async(
        self,
        prompt_token_ids: Prompt,
        sampling_params: Params = None,
        *,
        streaming: bool = True,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_context: dict[str, str] | None = None,
        extra: dict[str, Plain] | None = None,
    ) -> GenerationResult:
        """Submits one prompt; iterate over the result, or wait for it. The engine's sampling defaults where none are given."""
        request = GenerationRequest(
            prompt_token_ids=TokenIds.of(prompt_token_ids),
            sampling=default_sampling(self.info, sampling_params),
            streaming=streaming,
            timeout_s=timeout_s,
            priority=priority,
            cache_salt=cache_salt,
            trace_context=trace_context,
            extra=extra,
        )
        return self.submit(request)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Submits all, as room appears, and waits in order. One prompt gives one result, a list gives a list, `[]` gives `[]`.

        The first error is raised, Overloaded where nothing runs that could make room; what is still running is then aborted.
        `options` are those of `generate_async`.
        """
        many = [prompts] if (one := is_one_prompt(prompts)) else many_prompts(prompts)
        results: list[GenerationResult] = []
        try:
            for prompt, params in zip(many, per_prompt(sampling_params, len(many)), strict=True):
                results.append(self._submit_patiently(prompt, params, options))
            ended = [result.result() for result in results]
            return ended[0] if one else ended
        except BaseException:
            for result in results:
                result.abort()
            raise

    def _submit_patiently(self, prompt: Prompt, params: Params, options: Mapping[str, Any]) -> GenerationResult:
        while True:
            try:
                return self.generate_async(prompt, params, streaming=False, **options)
            except Overloaded as error:
                if not error.may_pass:
                    raise
                self.wait_for_room()

    def wait_for_room(self) -> None:
        """Blocks until something came back from the engine, or a tenth of a second: time to try again after Overloaded."""
        self._frontend.wait_for_room()

    def abort(self, client_id: int) -> None:
        """Ends one request with finish reason "abort", here at once and in the engine; a quiet no-op if it has ended."""
        self._check_process()
        self._frontend.abort(client_id)

    def abort_all(self) -> None:
        """Ends every request of this executor."""
        self._check_process()
        for client_id in self._frontend.ledger.open_ids():
            self.abort(client_id)

    def drop(self, client_id: int) -> None:
        """A result lost its last reference: only an append, since finalizers run inside any lock."""
        self._frontend.ledger.dropped.append(client_id)

    def health(self) -> Health:
        """What is known now: alive, reachable, getting on. Never raises or blocks; see `Health` for what each field means."""
        return health_of(self._frontend, None if os.getpid() == self._pid else foreign())

    @property
    def world_failure(self) -> EngineDeadError | None:
        """Why the engine world ended; None while it has not, or was told to."""
        return self._frontend.world_error

    @property
    def failure(self) -> TllmError | None:
        """Why the engine, or the lane to it, is lost; None while it is not."""
        return self._frontend.verdict

    def check_health(self) -> bool:
        """Whether the engine is alive, can be reached and gets on with its work; `health().reason` says why not.

        Never raises or blocks, and asks nobody: the frontend's own threads take in what arrives, whether or not anybody looks.
        """
        return self.health().ok

    def describe(self) -> dict[str, Plain]:
        """What `tllm explain` shows of a running executor: choices, processes, sockets."""
        world = self._frontend.world
        return {
            **self._plan.describe(),
            "endpoints": dict(self._plan.endpoints),
            "world": {} if world is None else dict(world.describe()),
        }

    # ---------------------------------------------------------------------------------------------------- the end

    def pre_shutdown(self) -> None:
        """From now on `submit` raises ExecutorClosedError; what runs goes on, and control calls work, until `shutdown`.

        For servers, before they wait for their requests. Never blocks or raises, also in a signal handler; may be called
        twice, from any thread and after the end.
        """
        if os.getpid() == self._pid:
            self._frontend.leave()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends pending requests with ExecutorClosedError and the engine world within `timeout` seconds (180 by default, 5 for
        a dead one). Idempotent, from any thread.

        Whoever waits for a request or control call, on any thread or loop, is woken by that error at once. Call it (or use
        `with`) before the main thread ends where other threads may be waiting: see `create`.
        """
        if os.getpid() != self._pid:
            return
        wait_s = SHUTDOWN_S if timeout is None else _bounded(timeout)
        self._mark_attach_files()
        if self._frontend.close(wait_s):
            self._plan.hooks.stopped(self)
        claims, self._claims = self._claims, {}
        for claim in claims.values():
            claim.release()

    def _mark_attach_files(self) -> None:
        """Who attaches just now would only see processes that are gone; of one that died, that is what there is to see."""
        if self._ticket is not None and self._frontend.world_error is None:
            for path in list(self._claims):
                mark_stopped(path, self._ticket)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise foreign()

    def __repr__(self) -> str:
        return f"GenerationExecutor({self._plan.summary()}, {self.health().state})"


def _stopped(path: str | os.PathLike[str]) -> EngineDeadError:
    return EngineDeadError(Cause(f"the engine of the attach file {os.fspath(path)} was stopped by its owner"))


_LIVE: weakref.WeakSet[Frontend] = weakref.WeakSet()


def _close_from_finalizer(frontend: Frontend, pid: int) -> None:
    if os.getpid() == pid:
        frontend.close_soon()


# Python runs this after it has joined all non-daemon threads and thread pools, and it must not run before: those may be at
# work with their executor still, as a server's thread or a pool's tasks are after the main thread's last line, and nothing
# tells a wait that will end from one that won't. `docs/adr/0009` has what was looked at.
@atexit.register
def _close_all() -> None:
    for frontend in list(_LIVE):
        if frontend.pid == os.getpid():
            frontend.close(SHUTDOWN_S)


def _overrides(choices: Mapping[str, tuple[str | None, Mapping[str, Any] | None]]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for section, (name, options) in choices.items():
        if name is not None:
            overrides[f"{section}.name"] = name
        if options is not None:
            overrides[f"{section}.options"] = dict(options)
    return overrides


def _bounded(timeout: float, error: type[Exception] = ValueError) -> float:
    """Seconds that any clock and system call can count. Raises `error` for what is no such number."""
    wait_s = seconds(timeout, error)
    return MAX_BOUND_S if wait_s is None else min(wait_s, MAX_BOUND_S)
