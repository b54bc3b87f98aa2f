"""Strangers at the transport: garbage, forged and replayed frames, and a wrong key change nothing but counters."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

import pytest

from tllm_core.conformance.case import case
from tllm_core.conformance.faults import EngineProcess, HostilePeer
from tllm_core.conformance.transport.pair import received
from tllm_core.conformance.transport.streams import ask, check, check_free
from tllm_core.conformance.transport.subject import LONG, TransportSubject, until
from tllm_core.contracts.interfaces import Capability, Frame
from tllm_core.contracts.messages import Abort, GenerationRequest, SamplingParams, Submit, TokenIds
from tllm_core.errors import TransportError
from tllm_core.wire.link import FrontendLink

NEEDED = Capability.CROSS_PROCESS | Capability.MANY_FRONTENDS


class HostileCases(TransportSubject):
    """Whoever has no key can do nothing but be counted."""

    def _hostile(self, world: EngineProcess) -> HostilePeer:
        return self.open.enter_context(contextlib.closing(HostilePeer(world.transport, world.address)))

    @case("I9", needs=NEEDED)
    def test_garbage_at_an_engine_is_counted_and_dropped(self) -> None:
        """Noise, cut heads, too many buffers: streams beside it are exact, and the engine counts and drops it.

        If this fails: the port reads frames, or dies of what it can't read.
        """
        world = self.world()
        streams = [world.owner.generate_async([number + 1, 8], SamplingParams(max_tokens=400)) for number in range(8)]
        stranger = self._hostile(world)
        for _ in range(10):
            stranger.garbage()
        for result in streams:
            check(result, 400)
        counts = world.owner.stats().extra["worker"]
        assert counts.get("truncated", 0) + counts.get("wrong_magic", 0) > 0, f"no garbage was counted: {counts}"
        check_free(world)

    @case("I9", needs=NEEDED)
    def test_a_wrong_key_opens_nothing(self) -> None:
        """A frontend with another key is not answered, and its Hellos change nothing but a counter.

        If this fails: frames are believed without their MAC.
        """
        world = self.world()
        sessions = world.owner.stats().extra["worker"]["sessions"]
        with contextlib.closing(world.link(key=secrets.token_bytes(32))) as link, pytest.raises(TransportError):
            link.open(0.7)
        assert world.owner.stats().extra["worker"]["sessions"] == sessions
        ask(world.owner, [3, 1])

    @case("I9", needs=NEEDED, timeout_s=60.0)
    def test_replayed_and_forged_frames_change_nothing(self) -> None:
        """Genuine frames of a session, sent again by it and by a stranger, as they are and spoiled, while its request runs and
        after its end, are counted and dropped.

        If this fails: a replayed Submit runs again, or a forged frame is believed.
        """
        world = self.start(wire__stall_after_s=60.0)  # nobody reads the stream
        link = world.link()
        self.open.callback(link.close)
        frames = _recorded(link)
        welcome = link.open(20.0)
        request = GenerationRequest(prompt_token_ids=TokenIds.of([5, 5]), sampling=SamplingParams(max_tokens=LONG))
        link.send(Submit(welcome.frontend_id << 48 | 1, request))
        while not link.receive(1.0):
            pass
        before = world.owner.stats()
        genuine = list(frames)
        self._replay(world, link, genuine)
        ask(world.owner, [6, 6], 200)
        after = world.owner.stats()
        assert after.running + after.waiting == before.running + before.waiting == 1
        link.send(Abort(None))
        until(lambda: _open_requests(world) == 0, "the request is aborted")
        self._replay(world, link, genuine)
        ask(world.owner, [6, 7], 200)
        assert _open_requests(world) == 0, "a request that had ended runs again"
        after = world.owner.stats()
        assert after.extra["worker"]["sessions"] == before.extra["worker"]["sessions"]
        link.close()
        world.owner.control("ping")

    def _replay(self, world: EngineProcess, link: FrontendLink, frames: list[Frame]) -> None:
        """By who sent them and by a stranger, who also says them spoiled."""
        stranger, itself = self._hostile(world), link._port
        for _ in range(3):
            stranger.say(frames)
            stranger.garbage(like=frames)
            for frame in frames:
                itself.send(frame)  # type: ignore[attr-defined]

    @case("I9", needs=Capability.MANY_FRONTENDS)
    def test_odd_frames_of_one_peer_harm_no_other(self) -> None:
        """At the level of ports: empty frames, empty buffers and a thousand buffers of one peer keep nobody else's back.

        If this fails: a frame of an unusual shape breaks the port or shifts what comes after it.
        """
        pair = self.pair()
        _, odd = pair.frontend()
        peer, frontend = pair.frontend()
        shapes: list[list[bytes]] = [[b""], [b"", b""], [b"x"] * 1000, [b"\0" * 100]]
        for shape in shapes:
            odd.send(shape)
        frontend.send([b"fine"])
        got = received(pair.engine, len(shapes) + 1)
        assert [b"fine"] in got
        assert [frame for frame in got if frame != [b"fine"]] == shapes
        pair.engine.send(peer, [b"as well"])
        assert received(frontend) == [[b"as well"]]


def _open_requests(world: EngineProcess) -> int:
    stats = world.owner.stats()
    return stats.running + stats.waiting


def _recorded(link: FrontendLink) -> list[Frame]:
    """What the link's port takes from now on."""
    frames: list[Frame] = []
    port: Any = link._port
    send = port.send

    def send_and_keep(frame: Frame) -> None:
        frames.append([bytes(part) for part in frame])
        send(frame)

    link._send_frame = send_and_keep
    link._sessions._send = send_and_keep
    return frames
