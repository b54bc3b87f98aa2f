"""Frames through a NATS server: core subjects, at most once; the lane above sends again what a server loses."""

from tllm_core.transports.nats.settings import NatsSettings
from tllm_core.transports.nats.transport import NatsTransport

__all__ = ["NatsSettings", "NatsTransport"]
