"""A clock that a test moves by hand, in place of the clocks of ``time``."""


class ManualClock:
    """Monotonic and wall time that pass only in ``sleep`` and ``advance``.

    Pass its methods where the product takes ``monotonic``, ``wall`` and ``sleep``. ``slept`` lists
    the durations of all sleeps, in seconds.
    """

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        self._monotonic += seconds
        self._wall += seconds

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def set_wall(self, time_s: float) -> None:
        """Set the wall clock, as NTP or an operator does; monotonic time is unaffected."""
        self._wall = time_s
