"""What plugin authors test with: real servers that can be killed, frozen and restarted.

Needs nothing but the standard library and, for each server, the wheel that brings its program.
"""

from tllm_core.conformance.broker import BrokerProcess, NatsServer, nats_server, valkey_server

__all__ = ["BrokerProcess", "NatsServer", "nats_server", "valkey_server"]
