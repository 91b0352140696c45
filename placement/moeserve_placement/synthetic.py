"""Load traces drawn at random: the same seed gives the same trace.

Popularity is a share of the assignments for each layer and expert; counts are drawn from it, so the traces carry the
chance of real ones.

Axes: G domains, L MoE layers, E logical experts.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from moeserve_placement.arrays import FloatArray
from moeserve_placement.load import LoadError, LoadTrace, LoadWindow


def dirichlet_popularity(
    rng: np.random.Generator, *, num_layers: int, num_experts: int, concentration: float
) -> FloatArray:
    """Popularity [L, E] drawn from a symmetric Dirichlet distribution: the lower the concentration, the more skewed."""
    return rng.dirichlet(np.full(num_experts, concentration), num_layers)


def drifting_trace(
    popularity_LE: FloatArray,
    *,
    num_windows: int,
    tokens_per_window: int,
    top_k: int,
    drift: float,
    seed: int,
    window_s: float = 10.0,
) -> LoadTrace:
    """Every expert wanders on its own: from window to window its popularity is multiplied by exp(drift x normal).

    It is drawn back to where it began by 1 % a window, so the skew of the whole neither grows nor dies out.
    """
    rng = np.random.default_rng(seed)
    home_LE = np.log(np.maximum(popularity_LE, 1e-12))

    def wander() -> Iterator[FloatArray]:
        log_LE = home_LE
        for _ in range(num_windows):
            yield np.exp(log_LE)
            log_LE = log_LE + 0.01 * (home_LE - log_LE) + drift * rng.standard_normal(home_LE.shape)

    return _drawn(wander(), rng, "synthetic drift", tokens_per_window=tokens_per_window, top_k=top_k, window_s=window_s)


def switching_trace(
    popularity_GLE: FloatArray,
    *,
    num_windows: int,
    windows_per_domain: int,
    tokens_per_window: int,
    top_k: int,
    seed: int,
    window_s: float = 10.0,
) -> LoadTrace:
    """One domain after the other, over and over, each for so many windows.

    Raises LoadError where domains or windows are none.
    """
    if not len(popularity_GLE) or windows_per_domain < 1:
        raise LoadError(
            f"a switching trace needs at least 1 domain and 1 window for each, got {len(popularity_GLE)} and "
            f"{windows_per_domain}"
        )
    domains = (popularity_GLE[index // windows_per_domain % len(popularity_GLE)] for index in range(num_windows))
    rng = np.random.default_rng(seed)
    return _drawn(domains, rng, "synthetic switch", tokens_per_window=tokens_per_window, top_k=top_k, window_s=window_s)


def domain_popularity(trace: LoadTrace) -> FloatArray:
    """Popularity [G, L, E] of each window of a trace, such as one converted from routing counts by domain."""
    load_GLE = np.stack([window.expert_load_LE for window in trace.windows])
    popularity_GLE: FloatArray = load_GLE / np.maximum(load_GLE.sum(axis=2, keepdims=True), 1.0)
    return popularity_GLE


def _drawn(
    popularities: Iterable[FloatArray],
    rng: np.random.Generator,
    model: str,
    *,
    tokens_per_window: int,
    top_k: int,
    window_s: float,
) -> LoadTrace:
    windows = []
    for index, weight_LE in enumerate(popularities):
        share_LE = weight_LE / weight_LE.sum(axis=1, keepdims=True)
        windows.append(
            LoadWindow(
                expert_load_LE=rng.multinomial(tokens_per_window * top_k, share_LE).astype(np.float64),
                start_s=index * window_s,
                end_s=(index + 1) * window_s,
                num_tokens=tokens_per_window,
                num_steps=100,
            )
        )
    num_layers = windows[0].expert_load_LE.shape[0] if windows else 0
    return LoadTrace(model=model, top_k=top_k, moe_layer_ids=tuple(range(num_layers)), windows=tuple(windows))
