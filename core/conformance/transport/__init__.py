"""The suite for transports: ports, whole executors over them, faults of every kind, and their capabilities."""

from tllm_core.conformance.transport.suite import TransportConformance

__all__ = ["TransportConformance"]
