"""Client ids: the frontend's id in the high 16 bits (bit 63 stays clear), a counter below that wraps inside its field."""

import itertools

COUNTER_BITS = 48
COUNTER_MASK = (1 << COUNTER_BITS) - 1
MAX_FRONTENDS = 32_767


def frontend_of(client_id: int) -> int:
    """The id of the frontend that drew `client_id`."""
    return client_id >> COUNTER_BITS


class ClientIds:
    """Draws client ids; safe from any thread."""

    def __init__(self, frontend_id: int, first: int = 1) -> None:
        if not 0 <= frontend_id < MAX_FRONTENDS:
            raise ValueError(f"frontend id must be in [0, {MAX_FRONTENDS}), not {frontend_id}")
        self._high = frontend_id << COUNTER_BITS
        self._counter = itertools.count(first)

    def draw(self) -> int:
        return self._high | (next(self._counter) & COUNTER_MASK)
