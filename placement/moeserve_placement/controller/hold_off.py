"""The pause after a migration that failed or did not gain: longer each time, until one keeps its promise."""


class HoldOff:
    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._num_misses = 0
        self._until_s = 0.0
        self.reason = ""

    def miss(self, now_s: float, reason: str) -> None:
        """Pause from now on, twice as long as after the last miss."""
        pause_s = self._first_s
        for _ in range(self._num_misses):
            pause_s = min(2.0 * pause_s, self._most_s)
        self._num_misses += 1
        self._until_s = now_s + pause_s
        self.reason = reason

    def clear(self) -> None:
        """The next miss is a first one again."""
        self._num_misses = 0

    def left_s(self, now_s: float) -> float:
        return max(0.0, self._until_s - now_s)
