"""moeserve serves Mixture-of-Experts language models, their experts spread over many ranks.

What this module offers is loaded when it is first asked for: importing moeserve costs nothing, and no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeserve.engine.sampling_params import SamplingParams
    from moeserve.llm import LLM

    __version__: str

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from moeserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from moeserve.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "__version__":
        from importlib.metadata import version

        return version("moeserve")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
