"""I9: frames that do not belong, handed to real sessions, whose state must stay as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tllm_core.contracts.interfaces import Frame
from tllm_core.wire.header import ACK, BEAT, DOWN, HELLO, LAYOUT, MESSAGE, OPEN_SIZE, STEP, WELCOME, Header
from tllm_core.wire.session import Session

from .links import SimEngineLink, SimFrontendLink
from .network import corrupted
from .violation import Violation

if TYPE_CHECKING:
    from .composition import Simulation


def header_of(frame: Frame) -> Header | None:
    """What it says of itself; None where it is cut short."""
    return Header._make(LAYOUT.unpack_from(frame[0])) if len(frame[0]) >= OPEN_SIZE else None


def lane_state(session: Session) -> tuple[int, ...]:
    sender, receiver = session.lane.sender, session.lane.receiver
    return sender.acked, sender.sent, sender.last, receiver.taken, receiver.ack


def engine_state(link: SimEngineLink) -> Any:
    sessions = link._sessions
    table = [
        (number, a.confirmed, a.last_beat, a.silence and a.silence._since, lane_state(a.session))
        for number, a in sessions.table.items()
    ]
    known = sessions._table
    ids = len(known.half_open), len(known._by_hello), dict(known._by_peer), set(known._ids._used)
    return table, ids, list(known._tombstones)


def frontend_state(link: SimFrontendLink) -> Any:
    sessions = link._sessions
    lane = None if sessions.session is None else lane_state(sessions.session)
    return lane, sessions.welcome, sessions.lost, sessions._last_beat, len(sessions.beats)


Link = SimFrontendLink | SimEngineLink


def open_links(sim: Simulation) -> list[tuple[str, Link]]:
    links: list[tuple[str, Link]] = []
    for process in sim.frontends:
        if process.alive:
            links.append((process.name, process.link))
            if process.watch_port is not None:
                links.append((f"{process.name} (watching)", process.watch_link))
    for engine in sim.engines:
        links += [(process.name, process.link) for process in (engine, engine.watcher) if process.alive]
    return links


def inject(sim: Simulation) -> None:
    """Some frames that were on the network before, each to somebody for whom it means nothing any more."""
    history, links = list(sim.network.history), open_links(sim)
    if not history or not links:
        return
    for _ in range(8):
        frame = sim.dice.choice(history)
        name, link = sim.dice.choice(links)
        if not sim.settings.by_reference and sim.chance(0.3):
            hand_over(sim, name, link, corrupted(frame, sim.network.rng), "corrupt")
        elif (reason := objection(link, frame)) is not None:
            hand_over(sim, name, link, frame, reason)


def objection(link: Link, frame: Frame) -> str | None:
    """Why the frame is nothing to that end; None where it may be."""
    header = header_of(frame)
    down = isinstance(link, SimFrontendLink)
    if header is None:
        return "cut short"
    if header.generation != link._terms.generation:
        return "of another generation"
    if bool(header.flags & DOWN) != down:
        return "of the other direction"
    return stale_down(link, header) if down else stale_up(link, header)


def stale_down(link: SimFrontendLink, header: Header) -> str | None:
    session = link._sessions.session
    if session is None:
        return None if header.kind == WELCOME else "of no session"
    if header.kind == WELCOME:
        return "a late welcome"
    if header.session != session.number:
        return "of another session"
    if header.kind in (MESSAGE, STEP) and header.sequence <= session.lane.receiver.taken:
        return "replayed"
    return "a replayed beat" if header.kind == BEAT and header.sequence <= link._sessions._last_beat else None


def stale_up(link: SimEngineLink, header: Header) -> str | None:
    attached = link._sessions.table.get(header.session)
    if header.kind == HELLO:
        return None
    if attached is None:
        return "of no session"
    if not attached.confirmed:
        return None
    session = attached.session
    fresh_ack = header.ack > session.lane.sender.acked
    if fresh_ack:
        return None
    if header.kind == MESSAGE and header.sequence <= session.lane.receiver.taken:
        return "replayed"
    if header.kind == BEAT and header.sequence <= attached.last_beat:
        return "a replayed beat"
    return "a replayed acknowledgement" if header.kind == ACK else None


def hand_over(sim: Simulation, name: str, link: Link, frame: Frame, reason: str) -> None:
    sim.trace("%s is handed a frame that is %s", name, reason)
    sessions, now = link._sessions, sim.timeline.now
    if isinstance(link, SimFrontendLink):
        before = frontend_state(link)
        messages: list[Any] = sessions.admit(sessions.read([frame]), now)
        after = frontend_state(link)
    else:
        before = engine_state(link)
        messages = sessions.take([frame], now)
        after = engine_state(link)
    if messages:
        raise Violation("I9", f"{name} took a frame that is {reason}: {messages}")
    if before != after:
        raise Violation("I9", f"a frame that is {reason} changed {name}: {before} -> {after}")
