"""Transports that claim what they can't do, and lanes with one fault behind a transport that is whole."""

from __future__ import annotations

import time

from msgspec import structs

from tests.mutants import caught_by
from tests.mutants.altered_ports import Altered
from tllm_core.contracts.interfaces import Capability
from tllm_core.transports.inproc import InprocTransport
from tllm_core.transports.nats import NatsTransport
from tllm_core.transports.redis import RedisTransport
from tllm_core.transports.zmq import ZmqTransport
from tllm_core.wire import header, lane


@caught_by("TestInproc", "test_frames_cross_between_processes", "the child's end could not be opened")
class ClaimsToCrossProcesses(InprocTransport):
    """Claims CROSS_PROCESS, and its addresses mean something in one process alone."""

    capabilities = InprocTransport.capabilities | Capability.CROSS_PROCESS


@caught_by(
    "TestZmqTcp", "test_frames_travel_over_an_address_that_other_hosts_can_reach", "all of it went over the address"
)
class ClaimsToCrossHosts(ZmqTransport):
    """Says a TCP address, and goes by a socket of this host."""

    def listen(self, engine, generation):
        port = super().listen(engine, generation)
        port.address.endpoints["short"] = port.bind(f"ipc://{self.settings.directory}/{engine[-10:]}")
        return port

    def connect(self, engine, peer):
        return super().connect(structs.replace(engine, endpoints={"zmq": engine.endpoints["short"]}), peer)


@caught_by("TestZmqTcp", "test_ports_find_each_other_again_after_an_outage", "no frame got through")
class ClaimsToReconnect(ZmqTransport):
    """Claims RECONNECTS, and tries to within the hour."""

    def __init__(self, settings):
        super().__init__(structs.replace(settings, reconnect_s=3600))


@caught_by("TestZmqIpc", "test_frames_taken_before_close_still_arrive", "of 48 frames came")
class ForgetsWhatItTook(ZmqTransport):
    """A port that is closed sends nothing more of what it had taken."""

    def __init__(self, settings):
        super().__init__(structs.replace(settings, linger_s=0))


@caught_by("TestZmqIpc", "test_a_peer_that_is_killed_is_reported_by_the_port_itself", "taken for there")
class ClaimsToNoticeLoss(ZmqTransport):
    """Claims PEER_LOSS, and a frontend sends on to an engine that is gone."""

    capabilities = ZmqTransport.capabilities | Capability.PEER_LOSS


@caught_by("TestNats", "test_a_receiver_that_does_not_read_holds_its_senders_back", "frames")
class ClaimsToBeReliable(NatsTransport):
    """Claims RELIABLE, and a server that drops what a slow reader has no room for."""

    capabilities = NatsTransport.capabilities | Capability.RELIABLE


# --------------------------------------------------------------------------------------------------------- the own path


@caught_by("TestNats", "test_path_ok_at_is_fresh_just_while_the_way_works", "after the broker stood still")
class PathIsAlwaysFine(Altered, NatsTransport):
    """`path_ok_at` is now, whether the server answers or not."""

    def alter(self, port):
        port.path_ok_at = time.monotonic


@caught_by("TestZmqIpc", "test_path_ok_at_is_fresh_just_while_the_way_works", "the engine's path is proven")
class PathIsNeverProven(Altered, ZmqTransport):
    """`path_ok_at` is when the port was opened, however well it works."""

    def alter(self, port):
        opened_at = time.monotonic()
        port.path_ok_at = lambda: opened_at


# ------------------------------------------------------------------------------------------------------------- leavings


@caught_by("TestZmqIpc", "test_nothing_is_left_behind", "a file is left")
class LeavesASocketFile(Altered, ZmqTransport):
    """The socket and the lock of an engine's name stay in the directory."""

    def alter_engine(self, port):
        port._held.release = port._held.disown

    def discard(self, address):
        """Leaves it as well."""


@caught_by("TestRedis", "test_nothing_is_left_behind", "nothing is left outside of this process")
class LeavesAKey(Altered, RedisTransport):
    """A key of the engine's stays at the server."""

    def alter_engine(self, port):
        connection = port._dialer.dial()
        connection.call("SET", f"{port.address.engine}-was-here", "1")
        connection.close()


# ---------------------------------------------------------------------------------------------------------------- lanes


@caught_by("TestZmqIpc", "test_a_wrong_key_opens_nothing", "DID NOT RAISE")
class BelievesAnyFrame(ZmqTransport):
    """Behind it, a lane whose seal takes every frame for genuine."""

    def __init__(self, settings):
        super().__init__(settings)
        header.Seal.is_genuine = lambda seal, frame: True


@caught_by("TestZmqIpc", "test_replayed_and_forged_frames_change_nothing", "a request that had ended runs again")
class RunsReplays(ZmqTransport):
    """Behind it, a lane that takes every frame for the next one."""

    def __init__(self, settings):
        super().__init__(settings)
        take = lane.Receiver.take
        lane.Receiver.take = lambda receiver, sequence, now: take(receiver, sequence, now) or sequence <= receiver.taken


@caught_by("TestZmqTcp", "test_cut_connections_change_nothing_that_is_received", "")
class SendsNothingAgain(ZmqTransport):
    """Behind it, a lane that does not send again what a connection took along."""

    def __init__(self, settings):
        super().__init__(settings)
        lane.Sender._go_back = lambda sender: None
        lane.Sender._resend_at = property(lambda sender: None, lambda sender, at: None)
