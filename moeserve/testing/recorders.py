"""Recorders of steps for devices without graphs, so that tests see what a replay that is wrong would do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST_READS = {"tolist", "item", "cpu", "numpy", "__int__", "__float__", "__bool__", "__index__", "__array__"}
_HOST_WRITES = {"tensor", "as_tensor"}
_HOST_WAITS = {
    "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim",
    "unique_consecutive",
}  # fmt: skip
"""Ops by whose contents the host learns a value or a shape; so it does where a mask is an index."""


class RepeatingRecorder:
    """Calls the step again, with the arguments that it was captured with; for steps with collectives.

    It counts, so that a test can tell that nothing is captured after the start.
    """

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.num_captures += 1
        step()

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return step()

        return replay


class TapeRecorder:
    """Writes down every op with its tensors and repeats these ops alone: as on a GPU, no line of Python runs again.

    What was bound to another tensor after the capture is not seen. Kernels must be ops of torch, as native ones are.
    """

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with refuse_host_reads() as tape:
            output = step()

        def replay() -> torch.Tensor:
            tape.repeat()
            return output

        return replay


@contextmanager
def refuse_host_reads() -> Iterator["OpTape"]:
    """AssertionError for what a captured step may not do inside: wait for a tensor's contents, or bring new ones in.

    The tape holds all ops that were called.
    """
    with _RefuseFunctions(), OpTape() as tape:
        yield tape


class _RefuseFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in _HOST_READS | _HOST_WRITES, f"{func.__name__} in a captured step"
        return func(*args, **(kwargs or {}))


class OpTape(TorchDispatchMode):
    """Every op with its tensors, in the order of the calls."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_waits(func._schema.name.removeprefix("aten::"), args)
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def repeat(self) -> None:
        """The same ops again: each reads and writes the memory it did before, whatever it holds by now."""
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for before, now in zip(tree_leaves(result), tree_leaves(again), strict=True):
                # A view, or an argument that was written to, is the same memory; all else gets the memory it had.
                if isinstance(before, torch.Tensor) and before.data_ptr() != now.data_ptr():
                    before.copy_(now)


def _refuse_waits(op: str, args: Any) -> None:
    assert op not in _HOST_WAITS, f"{op} waits for the device"
    if op.startswith(("index", "_index")):
        masks = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        assert not masks, f"{op} by a mask waits for the device"
