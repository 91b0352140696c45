"""One program on one rank or many: every way to start it gives the text that transformers gives."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from moeserve.testing.server import RunningServer, running_server

pytestmark = pytest.mark.e2e

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def greedy_texts(server: RunningServer, prompts: list[str], num_tokens: int) -> list[str]:
    """All prompts at once, so that the replicas of an engine work side by side."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def complete(prompt: str) -> str:
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=num_tokens, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(complete, prompts))


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        pytest.param(("-dp", "2"), (), id="dp2"),
        pytest.param(("-tp", "2"), (), id="tp2"),
        pytest.param(("-tp", "2", "--num-redundant-experts", "3"), (), id="tp2 with redundant experts"),
        pytest.param(("-tp", "2", "-dp", "2"), (*TORCHRUN, "4"), id="torchrun tp2 x dp2"),
        pytest.param(("-dp", "3"), (*TORCHRUN, "3"), id="torchrun dp3: 16 experts do not divide"),
    ],
)
def test_greedy_text_is_that_of_transformers(
    words: tuple[str, ...], launcher: tuple[str, ...], expected_texts: dict[str, str], num_tokens: int
) -> None:
    with running_server("demo", "--dtype", "float32", *words, launcher=launcher) as server:
        prompts = list(expected_texts)
        assert dict(zip(prompts, greedy_texts(server, prompts, num_tokens), strict=True)) == expected_texts
