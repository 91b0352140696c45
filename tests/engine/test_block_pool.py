"""The block pool against a model of it: who holds what, what is free, and what is found."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moeserve.engine.block_hash import BlockHash, block_hash, root_hash
from moeserve.engine.block_pool import BlockPool
from moeserve.ids import BlockId

NUM_BLOCKS = 6
NAMES = [BlockHash(bytes([i])) for i in range(8)]


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of blocks; the model keeps reference counts and the order in which blocks became free."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[BlockId]] = []
        self.names: dict[BlockId, BlockHash] = {}
        self.free = [BlockId(i) for i in range(NUM_BLOCKS)]

    def held(self) -> list[BlockId]:
        return [block_id for holder in self.holders for block_id in holder]

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        count = min(count, self.pool.num_free)
        block_ids = self.pool.allocate(count)
        assert block_ids == self.free[:count], "nameless blocks first, then the least recently held"
        del self.free[:count]
        for block_id in block_ids:
            self.names.pop(block_id, None)
        self.holders.append(block_ids)

    @rule(name=st.sampled_from(NAMES))
    def hold_a_cached_block(self, name: BlockHash) -> None:
        block_id = self.pool.find(name)
        if block_id is None:
            return
        self.pool.hold([block_id])
        if block_id in self.free:
            self.free.remove(block_id)
        self.holders.append([block_id])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_ids = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(block_ids)
        for block_id in reversed(block_ids):
            if block_id not in self.held():
                self.free.insert(len(self.free) if block_id in self.names else 0, block_id)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def publish(self, data: st.DataObject, name: BlockHash) -> None:
        nameless = sorted(set(self.held()) - self.names.keys())
        if not nameless:
            return
        block_id = data.draw(st.sampled_from(nameless))
        self.pool.publish(block_id, name)
        if name not in self.names.values():
            self.names[block_id] = name

    @invariant()
    def counts_equal_holders(self) -> None:
        held = self.held()
        assert [self.pool.ref_count(BlockId(i)) for i in range(NUM_BLOCKS)] == [
            held.count(i) for i in range(NUM_BLOCKS)
        ]
        assert sorted(self.free) == [i for i in range(NUM_BLOCKS) if i not in held]
        assert self.pool.num_free == len(self.free)

    @invariant()
    def names_find_their_blocks(self) -> None:
        by_name = {name: block_id for block_id, name in self.names.items()}
        assert [self.pool.find(name) for name in NAMES] == [by_name.get(name) for name in NAMES]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_end_of_a_chain_is_given_away_before_its_beginning() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    for block_id, name in zip(chain, NAMES, strict=False):
        pool.publish(block_id, name)
    pool.release(chain)
    assert pool.allocate(1) == [chain[2]]
    assert pool.find(NAMES[0]) == chain[0]


def test_more_blocks_than_are_free_is_a_programmers_error() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


def test_names_depend_on_salt_history_and_order() -> None:
    roots = [root_hash(""), root_hash("tenant")]
    names = [block_hash(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1], [258])]
    names += [block_hash(names[0], [1, 2]), *roots]
    assert len(set(names)) == len(names)
    assert block_hash(root_hash("tenant"), [1, 2]) == names[4]
