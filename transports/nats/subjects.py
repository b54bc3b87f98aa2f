"""Which subjects an engine and its frontends use. All but the name's own contain the generation."""

from __future__ import annotations

from msgspec import Struct

from tllm_core.contracts.interfaces import PeerId


class Subjects(Struct, frozen=True):
    """`prefix` and `engine` were checked before; what is added here is hexadecimal."""

    prefix: str
    engine: str
    generation: int

    @property
    def holder(self) -> str:
        """Answered by whoever holds the engine's name."""
        return f"{self.prefix}.{self.engine}.holder"

    def up(self, peer: PeerId) -> str:
        """Frames of that frontend."""
        return f"{self._lane}.up.{peer.hex()}"

    @property
    def up_from_all(self) -> str:
        return f"{self._lane}.up.*"

    def down(self, peer: PeerId) -> str:
        """Frames for that frontend."""
        return f"{self._lane}.down.{peer.hex()}"

    @property
    def _lane(self) -> str:
        return f"{self.prefix}.{self.engine}.{self.generation:016x}"
