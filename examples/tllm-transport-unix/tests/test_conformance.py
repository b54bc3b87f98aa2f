"""What every transport owes."""

from typing import Any

from tllm_core.conformance import TransportConformance


class TestUnix(TransportConformance):
    transport = "unix"
    narrow = {"queue_bytes": 1 << 16}  # noqa: RUF012 - soon full

    def settings(self, address: str) -> dict[str, Any]:
        return {"directory": self.directory}
