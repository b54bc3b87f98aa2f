"""What one schedule is like: bounds, times, weather, how many of everything. All of it drawn from the schedule's seed."""

from __future__ import annotations

import random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tllm_core.wire.liveness import LivenessSettings
from tllm_core.wire.settings import WireSettings
from tllm_core.world.worker import WorkerSettings

from .network import Weather

Profile = Literal["short", "long"]


class ScheduleSettings(Struct, kw_only=True):
    """`same_host`: the engine sees the end of frontends' processes. `attached`: frontends beside the owner. `calls`: what
    frontends' callers do. `faults`: how many things go wrong, within `active_s`. `step_s`: what an engine step takes.
    """

    profile: Profile
    by_reference: bool
    same_host: bool
    wire: WireSettings
    liveness: LivenessSettings
    worker: WorkerSettings
    weather: Weather
    world_size: int
    attached: int
    calls: int
    faults: int
    active_s: float
    step_s: float


LIVENESS = LivenessSettings(
    beat_interval_s=0.1,
    dead_after_s=0.8,
    hang_after_s=0.6,
    broker_down_after_s=1.3,
    reconnect_grace_s=0.2,
    frontend_dead_after_s=1.2,
    frontend_beat_s=0.2,
)
SHORT_LIVENESS = LivenessSettings(
    beat_interval_s=0.1,
    dead_after_s=0.5,
    hang_after_s=0.4,
    broker_down_after_s=0.9,
    reconnect_grace_s=0.1,
    frontend_dead_after_s=0.8,
    frontend_beat_s=0.2,
)


def draw(dice: random.Random, profile: Profile) -> ScheduleSettings:
    """`short`: a few requests and at most one fault, over in 50 ms; by the hundred thousand. `long`: whatever there is."""
    reliable = dice.random() < 0.5
    by_reference = dice.random() < 0.6
    tight = dice.random() < 0.6
    short = profile == "short"
    wire, weather = draw_wire(dice, tight), draw_weather(dice, reliable, by_reference)
    if weather.broker:
        # An outage ends all sessions at once, and each frontend has to be told.
        wire = replace(wire, tombstones=64)
    return ScheduleSettings(
        profile=profile,
        by_reference=by_reference,
        same_host=dice.random() < 0.5,
        wire=wire,
        liveness=replace(SHORT_LIVENESS if short else LIVENESS, end_hung=dice.random() < 0.5),
        worker=WorkerSettings(parked_bytes=dice.choice((1 << 12, 1 << 20)), stall_after_s=dice.choice((0.3, 2.0))),
        weather=weather,
        world_size=dice.choice((1, 2)),
        attached=dice.choice((0, 0, 0, 1) if short else (0, 0, 1, 1, 1, 2, 3)),
        calls=dice.randrange(1, 4) if short else dice.randrange(4, 16),
        faults=dice.choice((0, 1) if short else (0, 1, 1, 2, 3)),
        active_s=dice.choice((0.02, 0.05) if short else (0.15, 0.3, 0.6)),
        step_s=dice.choice((0.005, 0.02)),
    )


MAX_FRAME = 300
"""Just enough for a Welcome."""


def draw_wire(dice: random.Random, tight: bool) -> WireSettings:
    return WireSettings(
        window_frames=dice.choice((1, 2, 4)) if tight else 64,
        window_bytes=4096,
        backlog_frames=dice.choice((1, 2, 8)) if tight else 64,
        backlog_bytes=1 << 16,
        max_message_bytes=1 << 16,
        ack_every_frames=dice.choice((1, 4, 32)),
        ack_delay_s=0.01,
        resend_after_s=0.05,
        resend_max_s=0.3,
        # A reliable port that comes back needs no probe: what it lost has to be asked for.
        probe_after_s=60.0,
        hello_retry_s=0.05,
        max_half_open=dice.choice((2, 8)),
        half_open_s=0.5,
        tombstones=dice.choice((2, 64)),
    )


def draw_weather(dice: random.Random, reliable: bool, by_reference: bool) -> Weather:
    max_frame = dice.choice((None, None if by_reference else MAX_FRAME))
    if reliable:
        full, high_water, hears = dice.choice((0.0, 0.05)), dice.choice((4, 1000)), dice.random() < 0.5
        return Weather(full=full, high_water=high_water, jitter_s=0.005, max_frame=max_frame, engine_hears=hears)
    if dice.random() < 0.5:
        return Weather(
            reliable=False,
            broker=True,
            engine_hears=False,
            proof_s=0.1,
            double=dice.choice((0.0, 0.05)),
            high_water=dice.choice((3, 8, 1000)),
            jitter_s=0.005,
            max_frame=max_frame,
        )
    return Weather(
        reliable=False,
        max_frame=max_frame,
        drop=dice.choice((0.0, 0.05, 0.15)),
        overtake=dice.choice((0.0, 0.1)),
        double=dice.choice((0.0, 0.1)),
        corrupt=0.0 if by_reference else dice.choice((0.0, 0.05)),
        full=dice.choice((0.0, 0.05)),
        jitter_s=dice.choice((0.002, 0.02)),
        high_water=1000,
    )
