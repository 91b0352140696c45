"""Trains the demo model (Qwen3-MoE, 6 M parameters) on CPU from text folders, Python sources and C headers.

    python benchmarks/train_demo_model.py --text DIR [DIR ...] --minutes N [--output DIR] [--threads N] [--quick]

Data, initial weights and batches are seeded; the number of steps depends on the speed of the machine. With glibc,
`GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=2000000000:glibc.malloc.trim_threshold=8000000000`
saves about a tenth of the time.
"""

import argparse
import copy
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.demo_corpus import END_OF_TEXT, IM_END, BatchSampler, Domain, load_domains, train_tokenizer
from benchmarks.demo_model_card import TrainingRecord, evaluate, held_out_windows, write_card

SEED = 20
VOCAB_SIZE = 4096
CONTEXT = 2048
PEAK_LEARNING_RATE = 2e-3
WARMUP_SHARE = 0.02
FINAL_LEARNING_RATE_SHARE = 0.05
CHAT_SHARE = 0.12
ROUTER_AUX_LOSS_COEF = 0.005
LOAD_DECAY = 0.98
FIRST_WRITE_S = 180.0
CHECKPOINT_EVERY_S = 300.0
LOSS_CHUNK_TOKENS = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """From `start_share` of the time on, batches are `batch_size` sequences of `sequence_length` tokens."""

    start_share: float
    batch_size: int
    sequence_length: int


PHASES = (
    Phase(start_share=0.0, batch_size=8, sequence_length=256),
    Phase(start_share=0.5, batch_size=4, sequence_length=512),
    Phase(start_share=0.9, batch_size=1, sequence_length=CONTEXT),
)


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `hidden_TD @ weight_VD.T`, a few tokens at a time, so that logits stay in cache."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        num_tokens = hidden_TD.shape[0]
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_weight_VD = torch.zeros_like(weight_VD)
        loss = hidden_TD.new_zeros(())
        for start in range(0, num_tokens, LOSS_CHUNK_TOKENS):
            rows = slice(start, start + LOSS_CHUNK_TOKENS)
            labels_T1 = labels_T[rows].unsqueeze(-1)
            probs_TV = (hidden_TD[rows] @ weight_VD.T).softmax(dim=-1)
            loss -= probs_TV.gather(1, labels_T1).log().sum()
            grad_logits_TV = probs_TV.scatter_add_(1, labels_T1, torch.full_like(probs_TV[:, :1], -1.0))
            torch.mm(grad_logits_TV, weight_VD, out=grad_hidden_TD[rows])
            grad_weight_VD.addmm_(grad_logits_TV.T, hidden_TD[rows])
        ctx.save_for_backward(grad_hidden_TD.div_(num_tokens), grad_weight_VD.div_(num_tokens))
        return loss / num_tokens

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_TD * grad_outputs[0], grad_weight_VD * grad_outputs[0], None


class LoadBalance:
    """Load-balancing loss per layer against the load of many recent batches.

    Balance over a window much larger than a batch lets experts specialise by domain (a batch may be as skewed as it
    likes) and still keeps every expert alive (Qiu et al., "Demons in the Detail", 2025).
    """

    def __init__(self, config: Qwen3MoeConfig) -> None:
        self._top_k = config.num_experts_per_tok
        self._num_experts = config.num_experts
        self._share_LE = torch.full((config.num_hidden_layers, config.num_experts), 1 / config.num_experts)

    def __call__(self, router_logits: Sequence[Tensor]) -> Tensor:
        """Mean over layers of E * sum(share of load * mean probability); 1.0 is balanced."""
        probs_LTE = torch.stack(list(router_logits)).softmax(dim=-1)
        chosen_LTE = torch.zeros_like(probs_LTE).scatter_(2, probs_LTE.detach().topk(self._top_k, dim=-1).indices, 1.0)
        self._share_LE.lerp_(chosen_LTE.mean(dim=1) / self._top_k, 1 - LOAD_DECAY)
        return self._num_experts * (self._share_LE * probs_LTE.mean(dim=1)).sum(dim=-1).mean()


def model_config(tokenizer: Tokenizer) -> Qwen3MoeConfig:
    """The demo model's shape; about 5.98 M parameters."""
    end_of_text_id = tokenizer.token_to_id(END_OF_TEXT)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=ROUTER_AUX_LOSS_COEF,
        bos_token_id=end_of_text_id,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=end_of_text_id,
    )
    config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def save_tokenizer(tokenizer: Tokenizer, output: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, as transformers reads them."""
    tokenizer_config = {
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    tokenizer.save(str(output / "tokenizer.json"))
    write_json(output / "tokenizer_config.json", tokenizer_config)
    (output / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def save_model(model: Qwen3MoeForCausalLM, output: Path) -> None:
    """One bfloat16 safetensors file, config and generation config."""
    config = model.config
    copy.deepcopy(model).bfloat16().save_pretrained(output)
    # transformers 5 writes `num_local_experts` only; other readers of this architecture ask for `num_experts`.
    config_path = output / "config.json"
    write_json(config_path, json.loads(config_path.read_text(encoding="utf-8")) | {"num_experts": config.num_experts})
    generation_config = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": [config.eos_token_id, config.pad_token_id],
        "pad_token_id": config.pad_token_id,
    }
    write_json(output / "generation_config.json", generation_config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes sorted, indented JSON."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def publish(checkpoint: Path, output: Path) -> None:
    """Copies a checkpoint's files so that a reader of `output` sees each either whole or not at all."""
    output.mkdir(parents=True, exist_ok=True)
    for path in checkpoint.iterdir():
        partial = output / f".{path.name}.partial"
        shutil.copyfile(path, partial)
        os.replace(partial, output / path.name)


def learning_rate(share: float) -> float:
    """Warm-up, then cosine, over the share of the time that has passed."""
    if share < WARMUP_SHARE:
        return PEAK_LEARNING_RATE * max(share / WARMUP_SHARE, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (share - WARMUP_SHARE) / (1 - WARMUP_SHARE))))
    return PEAK_LEARNING_RATE * (FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


class Trainer:
    """The training loop over a wall-clock budget."""

    def __init__(self, domains: Sequence[Domain], tokenizer: Tokenizer, *, budget_s: float) -> None:
        config = model_config(tokenizer)
        self._domains = domains
        self._tokenizer = tokenizer
        self._budget_s = budget_s
        self._sampler = BatchSampler(domains, tokenizer, chat_share=CHAT_SHARE, seed=SEED)
        torch.manual_seed(SEED)
        self.model = Qwen3MoeForCausalLM(config)
        self._optimizer = make_optimizer(self.model)
        self._load_balance = LoadBalance(config)
        self._loss = math.log(VOCAB_SIZE)
        self._num_steps = 0
        self._num_tokens = 0

    def run(self, checkpoint: Path, output: Path) -> TrainingRecord:
        """Trains until the budget is spent; checkpoints regularly, publishes early once and at the end."""
        self.model.train()
        start_s = time.monotonic()
        next_write_s = min(FIRST_WRITE_S, self._budget_s / 2)
        published = False
        with tqdm(total=round(self._budget_s), unit="s", mininterval=10.0) as bar:
            while (elapsed_s := time.monotonic() - start_s) < self._budget_s:
                if elapsed_s >= next_write_s:
                    bar.write(self._report())
                    save_model(self.model, checkpoint)
                    if not published:
                        publish(checkpoint, output)
                        published = True
                    next_write_s = elapsed_s + CHECKPOINT_EVERY_S
                self._step(elapsed_s / self._budget_s)
                tokens_per_s = self._num_tokens / elapsed_s
                bar.set_postfix_str(f"loss {self._loss:.3f}, {tokens_per_s:.0f} tokens/s", refresh=False)
                bar.update(int(elapsed_s) - bar.n)
            bar.write(self._report())
        save_model(self.model, checkpoint)
        publish(checkpoint, output)
        return self._record(time.monotonic() - start_s)

    def _record(self, elapsed_s: float) -> TrainingRecord:
        names = [domain.name for domain in self._domains]
        return TrainingRecord(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            elapsed_s=elapsed_s,
            num_threads=torch.get_num_threads(),
            chat_share=CHAT_SHARE,
            domain_tokens=dict(zip(names, self._sampler.domain_tokens, strict=True)),
            domain_weights=dict(zip(names, self._sampler.domain_weights.tolist(), strict=True)),
        )

    def _report(self) -> str:
        """How the run stands: losses on training batches and on a few held-out windows of every domain."""
        self.model.train(False)
        losses = [
            f"{domain.name} {evaluate(self.model, held_out_windows(domain, self._tokenizer)[:8])[0]:.3f}"
            for domain in self._domains
        ]
        self.model.train()
        progress = f"step {self._num_steps}, {self._num_tokens} tokens, training {self._loss:.3f}"
        return f"{progress}; held out: {', '.join(losses)}"

    def _step(self, share: float) -> None:
        phase = [phase for phase in PHASES if phase.start_share <= share][-1]
        batch = torch.from_numpy(self._sampler.batch(phase.batch_size, phase.sequence_length))
        outputs = self.model.model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        loss = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            outputs.last_hidden_state.flatten(0, 1), self.model.lm_head.weight, batch[:, 1:].flatten()
        )
        (loss + ROUTER_AUX_LOSS_COEF * self._load_balance(outputs.router_logits)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(share)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not math.isfinite(loss.item()):
            raise ValueError(f"loss is {loss.item()} at step {self._num_steps}: training diverged")
        self._loss += (loss.item() - self._loss) * max(0.02, 1 / (self._num_steps + 1))
        self._num_steps += 1
        self._num_tokens += batch[:, 1:].numel()


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders of *.txt files, a domain each")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock training time")
    default_output = Path(__file__).resolve().parent.parent / "moeserve" / "demo_model"
    parser.add_argument("--output", type=Path, default=default_output, help="folder the model is written to")
    default_checkpoint = Path(tempfile.gettempdir()) / "demo_model_checkpoint"
    parser.add_argument("--checkpoint", type=Path, default=default_checkpoint, help="scratch folder of the run")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--quick", action="store_true", help="a few seconds only, to try the script")
    return parser.parse_args()


def main() -> None:
    """Corpus, tokenizer, training, model files."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    domains = load_domains(args.text, seed=SEED)
    tokenizer = train_tokenizer(domains, vocab_size=VOCAB_SIZE)
    args.checkpoint.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.checkpoint)
    publish(args.checkpoint, args.output)
    budget_s = 20.0 if args.quick else 60.0 * args.minutes
    record = Trainer(domains, tokenizer, budget_s=budget_s).run(args.checkpoint, args.output)
    write_card(args.output, domains, record)


if __name__ == "__main__":
    main()
