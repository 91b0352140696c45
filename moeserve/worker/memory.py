"""How many KV blocks a rank gets: from the configured bytes or the free memory, the same on all ranks of the engine."""

import hashlib
import socket

import psutil
import torch

from moeserve.config import CacheConfig, ConfigError
from moeserve.parallel import ParallelContext


def agree_on_num_blocks(
    config: CacheConfig, *, bytes_per_block: int, max_model_len: int, max_num_seqs: int, parallel: ParallelContext
) -> int:
    """KV blocks of every rank; collective over the engine, which takes the least of what its ranks can afford.

    Raises ConfigError, on all ranks, where they cannot hold one sequence of `max_model_len` tokens.
    """
    budget = kv_budget_bytes(config, free_bytes_of_rank(parallel))
    return num_kv_blocks(
        least_of_ranks(budget, parallel),
        bytes_per_block=bytes_per_block,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )


def num_kv_blocks(
    budget_bytes: int, *, bytes_per_block: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> int:
    """As many blocks as fit the budget, but no more than `max_num_seqs` sequences of the greatest length fill."""
    blocks_per_sequence = -(-max_model_len // block_size)
    num_blocks = min(budget_bytes // bytes_per_block, max_num_seqs * blocks_per_sequence)
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"too little memory for the KV cache: one sequence of {max_model_len} tokens needs "
            f"{blocks_per_sequence * bytes_per_block} bytes on each rank, there are {budget_bytes}: raise "
            "cache.kv_cache_memory or cache.memory_fraction, or lower model.max_model_len"
        )
    return num_blocks


def kv_budget_bytes(config: CacheConfig, free_bytes: int) -> int:
    """Bytes of a rank's KV cache. free_bytes: what the rank has once everything else is loaded."""
    return config.kv_cache_memory or int(free_bytes * config.memory_fraction)


def free_bytes_of_rank(parallel: ParallelContext) -> int:
    """This rank's part of the memory free now; collective over the engine.

    Between this and the next collective no rank may allocate what the others should still see as free.
    """
    num_neighbours = _count_ranks_on_same_memory(parallel)
    # All ranks are here and none has allocated anything since: now the free memory means the same to everyone.
    return free_memory_bytes(parallel.device) // num_neighbours


def least_of_ranks(value: int, parallel: ParallelContext) -> int:
    """The smallest value of the engine's ranks; collective."""
    mine = torch.tensor([value], dtype=torch.int64, device=parallel.device)
    return int(parallel.ep.all_gather(mine).min())


def free_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _count_ranks_on_same_memory(parallel: ParallelContext) -> int:
    """Ranks of the engine, with this one, that allocate from the same host's memory or the same GPU's."""
    name = f"{socket.gethostname()} {parallel.device}".encode()
    digest = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), signed=True)
    mine = torch.tensor([digest], dtype=torch.int64, device=parallel.device)
    return int((parallel.ep.all_gather(mine) == digest).sum())
