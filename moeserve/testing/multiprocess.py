"""Run a function on several ranks, each a process of its own, joined over gloo on this host."""

import functools
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_GRACE_S = 1.0
"""How long the other ranks may still report after the first failure: theirs may be the cause."""


class RankError(AssertionError):
    """Ranks failed, died or did not finish in time; holds their tracebacks."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`[fn(0, *args), fn(1, *args), ...]`, every rank in its own process, inside one gloo process group.

    `fn` is a module-level function, and its arguments and results are picklable. A rank has one thread, and
    `moeserve.parallel.init_parallel` joins the group that is there. Raises RankError with the traceback of every rank
    that failed; no process outlives the call.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="moeserve-ranks-") as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        processes: list[SpawnProcess] = []
        connections: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, functools.partial(fn, rank, *args)),
                    kwargs={
                        "init_method": rendezvous,
                        "rank": rank,
                        "world_size": world_size,
                        "timeout": timedelta(seconds=timeout_s),
                    },
                    daemon=True,
                )
                process.start()
                theirs.close()  # the end of the process is then the end of the pipe
                processes.append(process)
                connections.append(ours)
            return _collect(connections, processes, timeout_s)
        finally:
            _end(processes)
            for connection in connections:
                connection.close()


def _rank_main(connection: Connection, call: Callable[[], Any], **group: Any) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", **group)
        # Pickled by hand: the queues of torch.multiprocessing pass file descriptors, which die with the rank.
        message = pickle.dumps((True, call()))
        dist.barrier()  # a rank that leaves early would break the collectives of the others
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it was, the test has to see it
        message = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(message)


def _collect(connections: list[Connection], processes: list[SpawnProcess], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    pending = dict(zip(connections, range(len(connections)), strict=True))
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join(_GRACE_S)
                succeeded, value = False, f"died with exit code {processes[rank].exitcode}"
            (results if succeeded else failures)[rank] = value
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    late = sorted(pending.values())
    if failures:
        raise RankError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    if late:
        raise RankError(f"ranks {late} did not finish in {timeout_s} s")
    return [results[rank] for rank in range(len(connections))]


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()
