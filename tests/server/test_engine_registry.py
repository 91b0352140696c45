"""Which replica gets a request, and which life of it counts."""

from moeserve.engine.messages import ReplicaReady
from moeserve.ids import DpRank
from moeserve.server.affinity import PrefixAffinity
from moeserve.server.engine_registry import EngineRegistry

A, B = DpRank(0), DpRank(1)


def ready(dp_rank: DpRank, incarnation: str, max_model_len: int = 512) -> ReplicaReady:
    return ReplicaReady(
        dp_rank=dp_rank, incarnation=incarnation, num_blocks=64, block_size=16, max_model_len=max_model_len
    )


def two_replicas() -> EngineRegistry:
    registry = EngineRegistry(2)
    registry.register(ready(A, "a1"))
    assert not registry.is_ready
    registry.register(ready(B, "b1", max_model_len=400))
    assert registry.is_ready
    return registry


def test_the_least_outstanding_work_wins_and_ties_go_to_the_lowest() -> None:
    registry = two_replicas()
    assert registry.choose([1], "") == A
    registry.add_work(A, 10)
    assert registry.choose([2], "") == B
    registry.add_work(B, 11)
    assert registry.choose([3], "") == A


def test_a_known_prefix_is_worth_some_work_but_not_any() -> None:
    registry, prompt = two_replicas(), list(range(640))
    assert registry.choose(prompt, "") == A
    registry.add_work(A, 600)
    assert registry.choose([*prompt, 7], "") == A, "640 known tokens outweigh 600"
    assert registry.choose([*prompt, 7], "another tenant") == B
    registry.add_work(A, 500)
    assert registry.choose([*prompt, 7], "") == B, "1,100 outweigh any prefix"


def test_limits_are_those_of_the_weakest() -> None:
    assert two_replicas().max_model_len == 400
    assert EngineRegistry(1).max_model_len is None
    small_cache = EngineRegistry(1)
    small_cache.register(ready(A, "a1", max_model_len=4096))
    assert small_cache.max_model_len == 64 * 16


def test_a_second_life_makes_the_peers_wait_for_theirs() -> None:
    registry = two_replicas()
    registry.register(ready(B, "b2"))
    assert not registry.is_ready
    assert registry.ready_dp_ranks == [B]
    registry.register(ready(B, "b2"))
    assert not registry.is_ready, "the same life again changes nothing"
    registry.register(ready(A, "a2"))
    assert registry.is_ready
    assert (registry.incarnation(A), registry.incarnation(B)) == ("a2", "b2")


def test_a_lost_engine_comes_back_whole() -> None:
    registry = two_replicas()
    registry.lose_all()
    assert not registry.is_ready
    assert registry.read_stats() == {}
    registry.register(ready(A, "a2"))
    assert not registry.is_ready
    registry.register(ready(B, "b2"))
    assert registry.is_ready


def test_affinity_knows_whole_leading_chunks_only() -> None:
    affinity, prompt = PrefixAffinity(), list(range(300))
    affinity.record(A, prompt, "")
    assert affinity.num_known_tokens(A, prompt, "") == 256
    assert affinity.num_known_tokens(A, prompt[:100], "") == 64
    assert affinity.num_known_tokens(A, [9999, *prompt[1:]], "") == 0
    assert affinity.num_known_tokens(B, prompt, "") == 0
    affinity.forget(A)
    assert affinity.num_known_tokens(A, prompt, "") == 0


def test_affinity_forgets_the_oldest_chunks() -> None:
    affinity = PrefixAffinity(max_chunks=2)
    affinity.record(A, [1] * 128, "")
    affinity.record(A, [2] * 64, "")
    assert affinity.num_known_tokens(A, [2] * 64, "") == 64
    assert affinity.num_known_tokens(A, [1] * 128, "") == 0, "its first chunk was the oldest"
