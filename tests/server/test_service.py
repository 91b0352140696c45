"""Models, health, metrics, version, tokens, and the API page."""

from importlib.metadata import version

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from moeserve.tokenizer import Tokenizer


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    models = client.models.list()
    assert [model.id for model in models.data] == ["demo", "org/demo-alias"]
    assert {model.object for model in models.data} == {"model"}
    assert client.models.retrieve("org/demo-alias").id == "org/demo-alias"
    card = http.get("/v1/models").json()["data"][0]
    assert card["max_model_len"] == 512
    assert card["root"] == "demo"
    assert card["created"] > 1_700_000_000


def test_health_version_and_api_page(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/version").json() == {"version": version("moeserve")}
    assert "swagger" in http.get("/docs").text
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize"} <= set(paths)
    assert {"/health", "/metrics", "/version"} <= set(paths)


def test_tokenize_and_back(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "Grüße, <|im_end|> 東京"
    answer = http.post("/tokenize", json={"model": "demo", "prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    assert answer == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(token_id) for token_id in ids],
    }
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0


def test_tokenize_messages(http: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    opened = http.post("/tokenize", json={"messages": messages}).json()
    closed = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    assert opened["tokens"] == tokenizer.encode(prompt + "<|im_start|>assistant\n")
    assert closed["tokens"] == tokenizer.encode(prompt)
    assert opened["token_strs"] is None


def test_bad_tokens(http: httpx.Client) -> None:
    bad = http.post("/detokenize", json={"tokens": [1, 400]})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "tokens[1]"
    assert "between 0 and 399" in bad.json()["error"]["message"]
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        assert "prompt or messages" in http.post("/tokenize", json=body).json()["error"]["message"]


def read_metrics(http: httpx.Client) -> dict[str, float]:
    """Sums over labels other than `finished_reason`."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            name = sample.name if reason is None else f"{sample.name}:{reason}"
            totals[name] = totals.get(name, 0.0) + sample.value
    return totals


def test_metrics_count_what_happened(http: httpx.Client) -> None:
    before = read_metrics(http)
    answer = http.post("/v1/completions", json={"prompt": ["one", "two"], "max_tokens": 11})
    usage = answer.json()["usage"]
    after = read_metrics(http)
    growth = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert growth["moeserve:prompt_tokens_total"] == usage["prompt_tokens"]
    assert growth["moeserve:generation_tokens_total"] == usage["completion_tokens"] == 22
    assert growth["moeserve:request_success_total:length"] == 2
    assert growth["moeserve:request_success_total:stop"] == 0
    assert growth["moeserve:time_to_first_token_seconds_count"] == 2
    assert growth["moeserve:inter_token_latency_seconds_count"] == 20
    assert growth["moeserve:e2e_request_latency_seconds_count"] == 2
    assert growth["moeserve:e2e_request_latency_seconds_sum"] >= growth["moeserve:time_to_first_token_seconds_sum"] > 0
    assert after["moeserve:num_requests_running"] == after["moeserve:num_requests_waiting"] == 0
    assert after["moeserve:kv_cache_usage_perc"] == 0
    assert after["moeserve:num_free_kv_blocks"] == after["moeserve:num_kv_blocks"] == 256


def test_answers_are_counted_by_route_not_by_path(http: httpx.Client) -> None:
    http.get("/anything/goes")
    http.get("/v1/models/some/model")
    text = http.get("/metrics").text
    assert "anything" not in text
    assert 'moeserve:http_requests_total{route="none",status="404"}' in text
    assert "some/model" not in text
    assert 'moeserve:http_requests_total{route="/v1/models/{name:path}",status="404"}' in text
