"""The KV blocks of one DP replica: who holds them, which are free, and which still hold a known prefix.

A block is held (reference count > 0) or free, never both. A free block may still be cached: its contents stay findable
by name until it is given away again. Free blocks are given away in this order: those without a name, then the least
recently held. Every operation costs O(1) a block.
"""

from collections import OrderedDict
from collections.abc import Sequence

from moeserve.engine.block_hash import BlockHash
from moeserve.ids import BlockId


class BlockPool:
    """Reference counts, free list and prefix cache over block ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hash_of_block: list[BlockHash | None] = [None] * num_blocks
        self._block_of_hash: dict[BlockHash, BlockId] = {}
        # An OrderedDict is a linked list with O(1) removal from the middle, which a prefix hit needs. First = next out.
        self._free: OrderedDict[BlockId, None] = OrderedDict.fromkeys(BlockId(i) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def find(self, name: BlockHash) -> BlockId | None:
        """The block with these contents, held or free."""
        return self._block_of_hash.get(name)

    def allocate(self, count: int) -> list[BlockId]:
        """Hold `count` free blocks with undefined contents; what was cached in them is forgotten."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            name = self._hash_of_block[block_id]
            if name is not None:
                del self._block_of_hash[name]
                self._hash_of_block[block_id] = None
        return block_ids

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """One more holder for each of these (cached) blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """One holder less for each block of a request, given in the order of its tokens.

        The last block goes first, so that of one chain the end is given away before the beginning, without which it
        could not be found.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is not held"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._hash_of_block[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: BlockId, name: BlockHash) -> None:
        """Make the finished contents of a held block findable. The first block of a name wins."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not held"
        assert self._hash_of_block[block_id] is None, f"block {block_id} has a name"
        if self._block_of_hash.setdefault(name, block_id) == block_id:
            self._hash_of_block[block_id] = name
