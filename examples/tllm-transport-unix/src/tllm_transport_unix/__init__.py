"""Frames between processes of one host over Unix stream sockets."""

from tllm_transport_unix.settings import UnixSettings
from tllm_transport_unix.transport import UnixTransport

__all__ = ["UnixSettings", "UnixTransport"]
