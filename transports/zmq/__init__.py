"""Frames between processes over ZeroMQ: ipc by default, tcp by config. No broker."""

from tllm_core.transports.zmq.settings import ZmqSettings
from tllm_core.transports.zmq.transport import ZmqTransport

__all__ = ["ZmqSettings", "ZmqTransport"]
