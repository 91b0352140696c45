"""Traffic that changes its subject: texts of three domains, one after the other, to make other experts hot."""

import sysconfig
from importlib.resources import files
from pathlib import Path

from moeserve.loadgen.traffic import PlannedRequest, PromptBlock, TrafficClass

DOMAINS = ("prose", "code", "dutch")
_CODE_CHARS = 400_000


def load_domain_texts() -> dict[str, str]:
    """Prose and Dutch of this package, code of the standard library that runs. Raises ValueError without one."""
    texts = files("moeserve.loadgen") / "domain_texts"
    return {
        "prose": (texts / "prose.txt").read_text(encoding="utf-8"),
        "code": _standard_library(),
        "dutch": (texts / "dutch.txt").read_text(encoding="utf-8"),
    }


def _standard_library() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    sources: list[str] = []
    size = 0
    for path in sorted(folder.glob("[a-z]*.py")):
        if size >= _CODE_CHARS:
            break
        sources.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(sources[-1])
    if not sources:
        raise ValueError(f"the domain `code` is the standard library's source, and {folder} holds none")
    return "".join(sources)


class DomainTraffic:
    """Requests about one domain for a while, then about the next, and so on in a circle."""

    def __init__(
        self, traffic_class: TrafficClass, *, prompt_tokens: int, output_tokens: int, domain_s: float, seed: int
    ) -> None:
        if not domain_s > 0:
            raise ValueError(f"seconds a domain must be above 0, got {domain_s}")
        self._traffic_class = traffic_class
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._domain_s = domain_s
        self._seed = seed
        self._count = 0

    def domain_at(self, elapsed_s: float) -> str:
        return DOMAINS[int(elapsed_s / self._domain_s) % len(DOMAINS)]

    def next_request(self, elapsed_s: float) -> PlannedRequest:
        """Another one with every call."""
        self._count += 1
        block = PromptBlock(
            seed=(self._seed, self._count), num_tokens=self._prompt_tokens, domain=self.domain_at(elapsed_s)
        )
        return PlannedRequest(
            traffic_class=self._traffic_class, prompt=(block,), output_tokens=self._output_tokens, arrival_s=elapsed_s
        )
