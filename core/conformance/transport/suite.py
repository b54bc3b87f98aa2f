"""What a transport's test class derives from."""

from tllm_core.conformance.transport.aborts import AbortCases
from tllm_core.conformance.transport.claims import ClaimCases
from tllm_core.conformance.transport.deaths import DeathCases
from tllm_core.conformance.transport.ends import EndCases
from tllm_core.conformance.transport.hostile import HostileCases
from tllm_core.conformance.transport.leavings import LeavingCases
from tllm_core.conformance.transport.paths import PathCases
from tllm_core.conformance.transport.ports import PortCases
from tllm_core.conformance.transport.stateful import StatefulCases
from tllm_core.conformance.transport.streams import StreamCases


class TransportConformance(
    LeavingCases,
    StatefulCases,
    PathCases,
    DeathCases,
    HostileCases,
    AbortCases,
    StreamCases,
    ClaimCases,
    EndCases,
    PortCases,
):
    """Derive from it, and name the transport:

        class TestMqtt(TransportConformance):
            transport = "mqtt"
            broker = BrokerProcess("mosquitto", "-p", "{port}")

            def settings(self, address):
                return {"url": f"mqtt://{address}"}

    See `TransportSubject` for all that can be set. Pytest runs cases from the last base on: what looks for leftovers comes last.
    """
