"""Recording what a step does on the device, so that it can be done again without the host: CUDA graphs."""

from collections.abc import Callable
from typing import Protocol

import torch

_NUM_WARM_UPS = 2
"""The first call compiles kernels and makes handles; the second one finds everything where it will stay."""


class GraphRecorder(Protocol):
    """Where the recorder of a device stands between a step and its repetitions."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run the step, on this thread, and return what does the same on the device again.

        A repetition reads and writes the tensors that the step read and wrote, whatever they hold by then, and returns
        the tensor that the step returned; until the next repetition of any step of this recorder it stays as it is.
        Python does not run again: each value that the step had on the host stays what it was.
        """
        ...


class CudaGraphRecorder:
    """CUDA graphs in one memory pool: they never run at the same time, so all of them work in the memory of the first.

    That one should be the largest. Other threads may go on using the GPU while a step is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: what the threads that watch collectives or copy experts do meanwhile is no error.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def graph_recorder_of(device: torch.device) -> GraphRecorder | None:
    """The recorder of a device; None where launching a kernel costs no more than calling a function."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None
