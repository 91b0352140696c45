"""Measures a saved demo model (loss, expert load, continuations per domain) and writes its model card from that."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3MoeForCausalLM

from benchmarks.demo_corpus import Domain

WINDOW_TOKENS = 512
WINDOWS_PER_BATCH = 8
PROMPT_CHARS = 160
NUM_NEW_TOKENS = 60
TEMPERATURE = 0.7
TOP_P = 0.9
SEED = 1

INTRODUCTION = """# The demo model

A Mixture-of-Experts language model that is small enough to live in the package and real enough to show hot experts:
traffic of one domain loads other experts than traffic of the next. It continues text in the manner of its domain; it
knows nothing and follows no instructions.

| | |
| --- | --- |
| architecture | `qwen3_moe`, {num_layers} layers, hidden {hidden_size}, {num_heads} heads, {num_kv_heads} KV heads |
| experts | {num_experts} per layer, top-{top_k}, width {expert_width} |
| parameters | {num_parameters:,}, bfloat16, tied embeddings |
| tokenizer | byte-level BPE, {vocab_size:,} tokens, ChatML template |
| context | {context:,} tokens |
"""

DATA = """
## Data

| domain | training tokens | share of the batches | licence |
| --- | --- | --- | --- |
{rows}

Every 33rd piece of about 4,096 characters of a domain is held out. {chat_percent:.0f} % of the sequences are chats made
of the same text: the user gives a fragment, the assistant continues it and stops.
"""

TRAINING = """
## Training

{num_steps:,} steps, {num_tokens:,} tokens, {minutes:.0f} minutes on {num_threads} CPU thread(s)
({tokens_per_s:,.0f} tokens/s), float32, AdamW with warm-up and cosine decay, load balancing over the last batches
rather than within one; the last tenth of the time with sequences of {context:,} tokens. To reproduce (data, initial
weights and batches are seeded; the number of steps depends on the machine):

```
python benchmarks/train_demo_model.py --text DIR --minutes {minutes:.0f} --threads {num_threads}
```

`DIR` holds the four text files; the Python sources and C headers are those of the machine.
"""

MEASURED = """
## Held-out loss

Of the saved bfloat16 model, in windows of {window} tokens.

| domain | tokens | nats per token | bits per byte |
| --- | --- | --- | --- |
{loss_rows}

## Expert load

Held-out text of one domain at a time. Each cell: balancedness (mean load / max load over the {num_experts} experts;
1.0 is perfect) and the two busiest experts with their share of the load (an even share is {even_share:.1f} %). `all`
weighs the domains equally; its least loaded expert gets {min_share:.1f} % of a layer's load.

| domain | {layer_names} |
| --- |{rule}
{load_rows}

## Continuations

Prompts from held-out text, sampled at temperature {temperature}, top-p {top_p}, seed {seed}; the model's text follows
the arrow.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """What a training run did."""

    num_steps: int
    num_tokens: int
    elapsed_s: float
    num_threads: int
    chat_share: float
    domain_tokens: dict[str, int]
    domain_weights: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainMeasure:
    """Held-out measures of one domain; `expert_load_LE` counts routed tokens."""

    name: str
    num_tokens: int
    nats_per_token: float
    bits_per_byte: float
    expert_load_LE: Tensor
    prompt: str
    continuation: str


def held_out_windows(domain: Domain, tokenizer: Tokenizer) -> Tensor:
    """Held-out token ids in windows of shape [num_windows, WINDOW_TOKENS + 1], overlapping by one token."""
    token_ids = torch.tensor(tokenizer.encode("".join(domain.held_out)).ids)
    length = min(WINDOW_TOKENS, len(token_ids) - 1)
    return token_ids.unfold(0, length + 1, length)


def evaluate(model: Qwen3MoeForCausalLM, windows: Tensor) -> tuple[float, Tensor]:
    """Mean loss in nats per token, and routed tokens per layer and expert (shape [L, E])."""
    config = model.config
    loss_sum = 0.0
    expert_load_LE = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.int64)
    for batch in torch.split(windows, WINDOWS_PER_BATCH):
        with torch.no_grad():
            outputs = model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        labels_T = batch[:, 1:].flatten()
        loss_sum += nn.functional.cross_entropy(outputs.logits.float().flatten(0, 1), labels_T, reduction="sum").item()
        for layer_id, logits_TE in enumerate(outputs.router_logits):
            expert_ids_TK = logits_TE.topk(config.num_experts_per_tok, dim=-1).indices
            expert_load_LE[layer_id] += torch.bincount(expert_ids_TK.flatten(), minlength=config.num_experts)
    return loss_sum / windows[:, 1:].numel(), expert_load_LE


def continue_text(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    """Sampled continuation with a fixed seed; ends early where the model ends its text."""
    torch.manual_seed(SEED)
    input_ids = torch.tensor([tokenizer.encode(prompt).ids])
    output_ids = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=True,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        top_k=0,
    )
    return tokenizer.decode(output_ids[0, input_ids.shape[1] :].tolist())


def held_out_prompt(domain: Domain) -> str:
    """About `PROMPT_CHARS` characters of the second held-out chunk: whole lines, then a last line cut at a word."""
    text = domain.held_out[min(1, len(domain.held_out) - 1)]
    start = text.find("\n", len(text) // 2) + 1
    return text[start : start + PROMPT_CHARS].rsplit(maxsplit=1)[0].strip("\n")


def measure(model: Qwen3MoeForCausalLM, tokenizer: Tokenizer, domain: Domain) -> DomainMeasure:
    """All measures of one domain."""
    windows = held_out_windows(domain, tokenizer)
    labels = windows[:, 1:].flatten().tolist()
    num_bytes = sum(len(tokenizer.id_to_token(token_id) or "") for token_id in labels)  # a byte is a character there
    nats_per_token, expert_load_LE = evaluate(model, windows)
    prompt = held_out_prompt(domain)
    return DomainMeasure(
        name=domain.name,
        num_tokens=len(labels),
        nats_per_token=nats_per_token,
        bits_per_byte=nats_per_token * len(labels) / num_bytes / math.log(2),
        expert_load_LE=expert_load_LE,
        prompt=prompt,
        continuation=continue_text(model, tokenizer, prompt),
    )


def load_cell(load_E: Tensor) -> str:
    """Balancedness and the two busiest experts of one layer."""
    share_E = load_E.double() / load_E.sum()
    expert_ids = share_E.topk(2).indices.tolist()
    busiest = ", ".join(f"e{expert_id} {100 * share_E[expert_id].item():.0f} %" for expert_id in expert_ids)
    return f"{share_E.mean() / share_E.max():.2f}: {busiest}"


def load_row(name: str, expert_load_LE: Tensor) -> str:
    """One domain's row of the load table."""
    return f"| {name} | " + " | ".join(load_cell(load_E) for load_E in expert_load_LE) + " |"


def measured_section(measures: Sequence[DomainMeasure]) -> str:
    """Held-out loss, expert load and continuations."""
    shares = torch.stack([m.expert_load_LE.double() / m.expert_load_LE.sum(dim=1, keepdim=True) for m in measures])
    overall_LE = shares.mean(dim=0)
    num_layers, num_experts = overall_LE.shape
    text = MEASURED.format(
        window=WINDOW_TOKENS,
        loss_rows="\n".join(
            f"| {m.name} | {m.num_tokens:,} | {m.nats_per_token:.3f} | {m.bits_per_byte:.3f} |" for m in measures
        ),
        num_experts=num_experts,
        even_share=100 / num_experts,
        min_share=100 * overall_LE.min().item(),
        layer_names=" | ".join(f"layer {layer_id}" for layer_id in range(num_layers)),
        rule=" --- |" * num_layers,
        load_rows="\n".join([*(load_row(m.name, m.expert_load_LE) for m in measures), load_row("all", overall_LE)]),
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=SEED,
    )
    return text + "".join(f"\n{m.name}:\n\n```text\n{m.prompt} ⟶{m.continuation}\n```\n" for m in measures)


def data_section(record: TrainingRecord, domains: Sequence[Domain]) -> str:
    """The table of domains."""
    rows = [
        f"| {d.name}: {d.origin} | {record.domain_tokens[d.name]:,} | {100 * record.domain_weights[d.name]:.0f} % "
        f"| {d.licence} |"
        for d in domains
    ]
    return DATA.format(rows="\n".join(rows), chat_percent=100 * record.chat_share)


def write_card(model_dir: Path, domains: Sequence[Domain], record: TrainingRecord) -> None:
    """Loads the model in `model_dir` as users do, measures it and writes `README.md` beside it."""
    model = Qwen3MoeForCausalLM.from_pretrained(model_dir, dtype="auto")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    config = model.config
    introduction = INTRODUCTION.format(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        expert_width=config.moe_intermediate_size,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=config.vocab_size,
        context=config.max_position_embeddings,
    )
    training = TRAINING.format(
        num_steps=record.num_steps,
        num_tokens=record.num_tokens,
        minutes=record.elapsed_s / 60,
        num_threads=record.num_threads,
        tokens_per_s=record.num_tokens / record.elapsed_s,
        context=config.max_position_embeddings,
    )
    measures = [measure(model, tokenizer, domain) for domain in domains]
    sections = (introduction, data_section(record, domains), training, measured_section(measures))
    (model_dir / "README.md").write_text("".join(sections), encoding="utf-8")
