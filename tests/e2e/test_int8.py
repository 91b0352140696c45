"""`--quantization int8` reaches the ranks: the server answers with the log-probabilities of the quantized model."""

import openai
import pytest

from moeserve.engine.sampling_params import SamplingParams
from moeserve.llm import LLM
from moeserve.testing.server import running_server

pytestmark = pytest.mark.e2e

PROMPT = "def read_config(path):\n"


def test_the_flag_reaches_every_replica() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0)
    results = [LLM("demo", dtype="float32", quantization=name).generate(PROMPT, params)[0] for name in ("int8", "none")]
    expected, unquantized = ([record.logprob for record in result.logprobs or []] for result in results)
    assert expected != pytest.approx(unquantized, abs=1e-3)
    with running_server("demo", "-dp", "2", "--dtype", "float32", "--quantization", "int8") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for _ in range(2):
            answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=0)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
