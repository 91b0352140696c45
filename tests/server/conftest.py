"""A served fake engine, and the clients that users have."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import openai
import pytest

from moeserve.testing.served_engine import RunningFrontend, serve_fake_engine
from moeserve.testing.tokenizer_files import write_tokenizer
from moeserve.tokenizer import Tokenizer, load_tokenizer

SCRIPT = "Grüße aus Köln! 東京 🙂 says: one, two, three. STOP here, and END there."
EOS_ID = 2
SETTINGS = {"model": {"model": "demo", "served_model_name": ["demo", "org/demo-alias"]}}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def served(tokenizer_folder: Path, tokenizer: Tokenizer) -> Iterator[RunningFrontend]:
    """One replica whose next token is any of the vocabulary, decided by all tokens before it."""
    with serve_fake_engine(tokenizer_folder, SETTINGS, vocab_size=tokenizer.vocab_size) as running:
        yield running


@pytest.fixture(scope="session")
def http(served: RunningFrontend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=30.0) as client:
        yield client


@pytest.fixture(scope="session")
def client(served: RunningFrontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=30.0) as client:
        yield client


@pytest.fixture(scope="session")
def scripted(tokenizer_folder: Path, tokenizer: Tokenizer) -> Iterator[RunningFrontend]:
    """Answers every prompt with SCRIPT and the end-of-sequence token, whatever is asked."""
    script = [*tokenizer.encode(SCRIPT), EOS_ID]

    def next_token(kv: int, token_ids: Sequence[int], num_prompt_tokens: int) -> int:
        return script[min(len(token_ids) - num_prompt_tokens, len(script) - 1)]

    settings = {"model": {"model": "demo"}}
    with serve_fake_engine(
        tokenizer_folder, settings, vocab_size=tokenizer.vocab_size, eos_token_ids=(EOS_ID,), next_token=next_token
    ) as running:
        yield running


@pytest.fixture(scope="session")
def scripted_client(scripted: RunningFrontend) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=30.0) as client:
        yield client


@pytest.fixture(scope="session")
def scripted_http(scripted: RunningFrontend) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=30.0) as client:
        yield client


@pytest.fixture(scope="session")
def script() -> str:
    """What the scripted engine says."""
    return SCRIPT
