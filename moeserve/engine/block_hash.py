"""Names for the contents of KV blocks: a hash chain, so that equal names mean equal tokens from the very start.

The KV of a token depends on every token before it. So a full block is named by the hash of its tokens and of its
parent's name, and the chain starts from the tenant's salt: requests with different salts never share a block.
A cryptographic hash of 256 bits stands for the tokens themselves; nothing is compared on a hit.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""Name of a full block's tokens and of all tokens before them."""

_DIGEST_BYTES = 32


def root_hash(cache_salt: str) -> BlockHash:
    """The parent of every first block of a tenant."""
    return BlockHash(blake2b(cache_salt.encode(), digest_size=_DIGEST_BYTES, person=b"root").digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of a full block behind `parent`; token ids below 2**63."""
    hasher = blake2b(parent, digest_size=_DIGEST_BYTES, person=b"block")
    hasher.update(array("q", token_ids).tobytes())
    return BlockHash(hasher.digest())
