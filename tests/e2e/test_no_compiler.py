"""Where no compiler is, plain torch serves the same text, and one line says why."""

from pathlib import Path

import httpx
import pytest

from moeserve.testing.server import running_server

pytestmark = pytest.mark.e2e

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["serve", "torchrun"])
def test_without_a_compiler_torch_serves(
    launcher: tuple[str, ...], expected_texts: dict[str, str], num_tokens: int, tmp_path: Path
) -> None:
    environ = {"CXX": "/nowhere/c++", "XDG_CACHE_HOME": str(tmp_path)}
    with running_server("demo", "-tp", "2", "--dtype", "float32", launcher=launcher, environ=environ) as server:
        prompt, expected = next(iter(expected_texts.items()))
        request = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected
        told = [line for line in server.lines if "no native CPU kernels" in line]
        assert len(told) == 1, server.lines
        assert "plain torch computes instead: the C++ compiler /nowhere/c++ cannot be run" in told[0]
        assert "Traceback" not in "\n".join(server.lines)
