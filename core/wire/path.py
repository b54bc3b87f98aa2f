"""How long this side's own path has had no proof. Sans-IO: times are passed in."""


class PathWatch:
    """Judges one port's path. A judge that was frozen itself begins anew."""

    __slots__ = ("_after_s", "_awake_since", "_polled_at")

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._awake_since = 0.0
        self._polled_at: float | None = None

    def lost_for_s(self, now: float, path_ok_at: float) -> float | None:
        """Seconds without proof, once they are more than `after_s`; else None. `path_ok_at`: when the path was last proven."""
        if self._polled_at is None or now - self._polled_at > self._after_s / 2:
            self._awake_since = now
        self._polled_at = now
        down_s = now - max(path_ok_at, self._awake_since)
        return down_s if down_s > self._after_s else None
