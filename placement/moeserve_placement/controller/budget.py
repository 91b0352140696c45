"""The byte budget of migrations: a token bucket."""


class ByteBudget:
    """Fills at a rate up to a burst; what is spent in any interval is at most burst + rate x its length."""

    def __init__(self, *, bytes_per_s: float, burst_bytes: int, now_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._saved_bytes = float(burst_bytes)
        self._since_s = now_s

    def available(self, now_s: float) -> int:
        """Bytes that may be spent now."""
        return int(self._refilled(now_s))

    def spend(self, num_bytes: int, now_s: float) -> None:
        assert num_bytes <= self.available(now_s)
        self._saved_bytes = self._refilled(now_s) - num_bytes
        self._since_s = now_s

    def _refilled(self, now_s: float) -> float:
        return min(self._burst_bytes, self._saved_bytes + (now_s - self._since_s) * self._bytes_per_s)
