"""Gives requests their KV blocks: prefix hits and the whole known history at admission, one more block while decoding.

A request is admitted only with blocks for all tokens it has, so a prefill never stops halfway for memory and decoding
alone can run out of it. Blocks found in the cache are full and before the last token, so nobody ever writes into a
block that somebody else reads: all writes of a request go to blocks it holds alone.
"""

from moeserve.engine.block_pool import BlockPool
from moeserve.engine.request import Request
from moeserve.ids import BlockId


class KVAllocator:
    """Block tables of requests over one pool."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_prefix_queried_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def num_slots(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pool.num_blocks * self.block_size

    def admit(self, request: Request, *, reserve: int) -> bool:
        """Give a request without blocks what all its tokens need, unless fewer than `reserve` blocks then stay free."""
        assert not request.block_ids
        hits = self._find_prefix(request)
        num_new = -(-len(request.token_ids) // self.block_size) - len(hits)
        num_free_hits = sum(self.pool.ref_count(block_id) == 0 for block_id in hits)
        if num_new + num_free_hits + reserve > self.pool.num_free:
            return False
        self.pool.hold(hits)
        request.block_ids = hits + self.pool.allocate(num_new)
        request.num_published_blocks = len(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        self._count_hits(request)
        return True

    def grow(self, request: Request) -> bool:
        """See that the last token has a slot; False when there is no free block for it."""
        if len(request.token_ids) <= len(request.block_ids) * self.block_size:
            return True
        if self.pool.num_free == 0:
            return False
        request.block_ids += self.pool.allocate(1)
        return True

    def publish(self, request: Request) -> None:
        """Make the blocks whose tokens are all computed findable."""
        if not self._enable_prefix_caching:
            return
        for index in range(request.num_published_blocks, request.num_computed_tokens // self.block_size):
            self.pool.publish(request.block_ids[index], request.block_hash(index, self.block_size))
            request.num_published_blocks = index + 1

    def release(self, request: Request) -> None:
        """Take all blocks back; what was computed must be found in the cache or computed again."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_published_blocks = 0
        request.num_computed_tokens = 0

    def _find_prefix(self, request: Request) -> list[BlockId]:
        """The longest cached chain that leaves at least the last token to compute: its logits are needed."""
        hits: list[BlockId] = []
        if not self._looks_up(request):
            return hits
        for index in range((len(request.token_ids) - 1) // self.block_size):
            block_id = self.pool.find(request.block_hash(index, self.block_size))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _count_hits(self, request: Request) -> None:
        """Only the first admission counts: finding one's own blocks after a preemption saves nobody anything."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if self._looks_up(request):
                self.num_prefix_queried_tokens += len(request.token_ids)
                self.num_prefix_hit_tokens += request.num_computed_tokens

    def _looks_up(self, request: Request) -> bool:
        """Log-probabilities of the prompt need every prompt token to pass through the model."""
        return self._enable_prefix_caching and request.sampling_params.prompt_logprobs is None
