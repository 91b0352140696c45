"""`moeserve chat` and `moeserve complete`: a terminal on a running server, streaming."""

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that chat and complete share."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    parser.add_argument("--model", help="default: the first model the server lists")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int)


def run_complete(arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    """Print the prompt's continuation as it comes."""
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    client = _Client(arguments)
    for chunk in client.stream("/v1/completions", {"prompt": prompt}):
        for choice in chunk["choices"]:
            print(choice["text"], end="", flush=True)
    print()
    return 0


def run_chat(arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    """Read a line, stream the answer, keep the conversation; ends with the input (Ctrl-D)."""
    client = _Client(arguments)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    print(f"{client.model} at {arguments.url} - Ctrl-D ends", file=sys.stderr)
    for line in _lines():
        messages.append({"role": "user", "content": line})
        answer = ""
        for chunk in client.stream("/v1/chat/completions", {"messages": messages}):
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") or ""
                answer += text
                print(text, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def call_server(url: str, path: str, *, key: str | None = None, body: Any = None, method: str | None = None) -> Any:
    """The open response; POST where there is a body, unless said otherwise. Raises ConnectionError with what it said.

    url: the server's, with or without /v1. key: sent as a bearer token.
    """
    base = url.rstrip("/").removesuffix("/v1")
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(base + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        return urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"{base}{path}: {_error_message(error)}") from error
    except (urllib.error.URLError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"no server at {base}: {reason}") from error


class _Client:
    """The few calls of the OpenAI API that a terminal needs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._url = arguments.url
        self._key = arguments.api_key
        self._settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        if arguments.seed is not None:
            self._settings["seed"] = arguments.seed
        self.model = arguments.model or self._first_model()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer. Raises ConnectionError with what the server said."""
        payload = {"model": self.model, "stream": True, **self._settings, **body}
        with call_server(self._url, path, key=self._key, body=payload) as response:
            for raw in response:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ConnectionError(f"{self._url}: {chunk['error']['message']}")
                yield chunk

    def _first_model(self) -> str:
        with call_server(self._url, "/v1/models", key=self._key) as response:
            return str(json.load(response)["data"][0]["id"])


def _error_message(error: urllib.error.HTTPError) -> str:
    try:
        return f"{error.code} {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
