"""What a broken promise is reported as."""


class Violation(BaseException):
    """An invariant of DESIGN section 2 does not hold. Not an Exception, so that no loop takes it for a failure of its own."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
