"""When a DP replica steps and when it may sleep, so that no replica ever waits for a peer that sleeps. No I/O.

The replicas of an engine step together: each step is an agreement that all must enter. Between two waves of steps all
sleep. *Idle in w* is the sleep before wave w, *active in w* its steps. A replica that leaves idle w for work of its own
says `WaveStarted(w)`, and the frontend tells its peers `StartWave(w)`. The agreement ends wave w on all replicas with
the same step, the first in which none has tokens. So replicas differ by less than one wave, and this is all that can
meet:

| event            | idle in w                           | active in w                                              |
|------------------|-------------------------------------|----------------------------------------------------------|
| work             | active in w, say WaveStarted(w)     | stay: one of the next steps sees to it                   |
| StartWave(w)     | active in w, say nothing            | ignore: both left by themselves, or it was told before   |
| StartWave(< w)   | ignore: late, that wave is over     | ignore: the same                                         |
| StartWave(w + 1) | (needs an end of w without us)      | remember: a peer learnt of the end of w before us        |
| end of wave      | (needs our vote)                    | idle in w + 1; active there at once if it was remembered |

A loop that blocks in its step reads nothing between its last vote in w and the end of w, so it never meets the row of
StartWave(w + 1); a loop that reads meanwhile would. A request that arrives in that time waits in the socket, and wakes
the replica from idle w + 1. Work is a request, or a change of the expert placement to vote for or to withdraw.

The frontend holds requests back until all replicas of the engine are ready: a StartWave for one that is not connected
yet would be lost.
"""

from moeserve.ids import WaveId


class WaveTracker:
    """Where one replica stands in the waves of its engine."""

    def __init__(self) -> None:
        self.wave_id = WaveId(0)
        self.is_idle = True
        self._next_has_started = False

    def work_arrived(self) -> bool:
        """Whether the replica has left idle for it: its peers must be told."""
        was_idle, self.is_idle = self.is_idle, False
        return was_idle

    def start(self, wave_id: WaveId) -> None:
        """A peer has left idle `wave_id`."""
        if wave_id == self.wave_id:
            self.is_idle = False
        elif wave_id == self.wave_id + 1 and not self.is_idle:
            self._next_has_started = True

    def end(self) -> None:
        """The engine has agreed that no replica has work."""
        assert not self.is_idle, "a wave ends by a step"
        self.wave_id = WaveId(self.wave_id + 1)
        self.is_idle = not self._next_has_started
        self._next_has_started = False
