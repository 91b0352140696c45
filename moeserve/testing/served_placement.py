"""A frontend and ranks that follow its placement without experts, and an operator's client: for tests of placement."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from moeserve.testing.fake_migrators import FakeMigrators
from moeserve.testing.served_engine import RunningFrontend, run_frontend_in_thread, wait_until
from moeserve_placement import ExpertPlacement
from moeserve_placement.arrays import FloatArray

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 16, 4
START = ExpertPlacement.identity(
    num_layers=NUM_LAYERS, num_logical_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=4
)
SKEWED_LE = np.random.default_rng(3).dirichlet(np.ones(NUM_EXPERTS), NUM_LAYERS)
_ADMIN = {"Authorization": "Bearer admin-key"}


@dataclass
class ServedPlacement:
    """A frontend, its ranks, and a client that is an operator."""

    running: RunningFrontend
    ranks: FakeMigrators
    http: httpx.Client
    rng: np.random.Generator

    def show(self) -> dict[str, Any]:
        """What GET /v1/placement says."""
        answer = self.http.get("/v1/placement")
        assert answer.status_code == 200
        shown: dict[str, Any] = answer.json()
        return shown

    def serve(self, popularity_LE: FloatArray, num_windows: int = 1, *, tokens: int = 20_000) -> None:
        """Report windows, one after the other: each is seen before the next."""
        for _ in range(num_windows):
            num_seen = self.num_seen() + 1
            self.ranks.report(self.rng.multinomial(tokens, popularity_LE))
            self.wait_for_windows(num_seen)

    def wait_for_windows(self, num_windows: int) -> None:
        """Return when the controller has looked at so many."""
        wait_until(lambda: self.num_seen() >= num_windows)

    def serve_until(self, state: str, popularity_LE: FloatArray, *, most: int = 20) -> None:
        """Windows that began before a commit do not count, so their number depends on how fast answers travel."""
        for _ in range(most):
            self.serve(popularity_LE)
            if self.show()["state"] == state:
                return
        raise AssertionError(f"not {state} after {most} windows: {self.show()['reason']}")

    def num_seen(self) -> int:
        return self.running.frontend.placement.view.num_windows_seen

    def wait_for_state(self, *states: str) -> None:
        wait_until(lambda: self.show()["state"] in states)

    def decisions(self) -> list[dict[str, Any]]:
        """Newest first."""
        found: list[dict[str, Any]] = self.http.get("/v1/placement/decisions").json()["decisions"]
        return found

    def acts(self) -> list[dict[str, Any]]:
        return [each for each in self.decisions() if each["action"] in ("migrate", "roll back")]

    def order(self, what: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        return self.http.post(f"/v1/placement/{what}", json=body)

    def metrics(self) -> dict[str, float]:
        lines = (line.rpartition(" ") for line in self.http.get("/metrics").text.splitlines() if line[0] != "#")
        return {name.removeprefix("moeserve:placement_"): float(value) for name, _, value in lines}


@contextmanager
def serve_placement(
    folder: Path, *, dp_size: int = 2, placement: Mapping[str, Any] | None = None, num_spare_places: int = 16
) -> Iterator[ServedPlacement]:
    """Four ranks, three MoE layers of 16 experts on 20 places; ready, without any load yet."""
    settings: dict[str, dict[str, Any]] = {
        "parallel": {"data_parallel_size": dp_size, "tensor_parallel_size": NUM_RANKS // dp_size},
        "server": {"admin_key": "admin-key"},
        "placement": {"num_windows": 2, "hold_off_s": 0.0, **(placement or {})},
    }
    with (
        run_frontend_in_thread(folder, settings) as running,
        httpx.Client(base_url=running.url, headers=_ADMIN, timeout=30.0) as http,
        FakeMigrators(
            running.engine_address, START, dp_size=dp_size, num_spare_places=num_spare_places
        ).running() as ranks,
    ):
        served = ServedPlacement(running, ranks, http, np.random.default_rng(0))
        served.wait_for_state("observing")
        yield served
