"""Writes a random Qwen3-MoE checkpoint of a given shape, for benchmarks: weights, config, and a tokenizer of its size.

    python benchmarks/make_checkpoint.py --shape mid
    python benchmarks/make_checkpoint.py --shape tiny --out /tmp/tiny --json -

The text for the tokenizer is this repository's documentation and the standard library's sources, so nothing is fetched.
A checkpoint that is there already is left alone.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.demo_corpus import (
    END_OF_TEXT,
    IM_END,
    Domain,
    python_files,
    sample_sources,
    split_domain,
    train_tokenizer,
)
from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.machine import cache_folder

ROOT = Path(__file__).resolve().parents[1]
SEED = 7
TOKENIZER_BYTES = 3_000_000
EMBEDDING_STD = 1.0
"""Large beside the other weights, so that what comes next depends on the token: greedy outputs of different prompts do
not fall into one common loop, which would send all clients to the same few experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3-MoE model, every layer of it sparse."""

    hidden_size: int
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    expert_width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context: int

    @property
    def num_parameters(self) -> int:
        return self._outside_experts + self.num_layers * self.num_experts * self._expert

    @property
    def num_active_parameters(self) -> int:
        """Multiplied with a token: without the embedding table and the head, as is the custom."""
        tables = 2 * self.vocab_size * self.hidden_size
        return self._outside_experts - tables + self.num_layers * self.num_experts_per_token * self._expert

    @property
    def _expert(self) -> int:
        return 3 * self.hidden_size * self.expert_width

    @property
    def _outside_experts(self) -> int:
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.hidden_size + 2 * self.head_size
        gate = self.num_experts * self.hidden_size
        tables = 2 * self.vocab_size * self.hidden_size
        return tables + self.hidden_size + self.num_layers * (attention + norms + gate)


SHAPES = {
    "mid": Shape(
        hidden_size=1024,
        num_layers=16,
        num_experts=32,
        num_experts_per_token=4,
        expert_width=512,
        num_heads=16,
        num_kv_heads=4,
        head_size=64,
        vocab_size=8192,
        context=4096,
    ),
    "small": Shape(
        hidden_size=512,
        num_layers=8,
        num_experts=16,
        num_experts_per_token=4,
        expert_width=256,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        vocab_size=8192,
        context=4096,
    ),
    "tiny": Shape(
        hidden_size=128,
        num_layers=4,
        num_experts=8,
        num_experts_per_token=2,
        expert_width=64,
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        vocab_size=2048,
        context=4096,
    ),
}


def main() -> None:
    arguments = _arguments()
    name = "tiny" if arguments.quick else arguments.shape
    folder = arguments.out or cache_folder() / "checkpoints" / name
    start = time.perf_counter()
    is_new = ensure_checkpoint(folder, SHAPES[name])
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    record = {
        "shape": name,
        **asdict(SHAPES[name]),
        "num_parameters": SHAPES[name].num_parameters,
        "num_active_parameters": SHAPES[name].num_active_parameters,
        "num_bytes": num_bytes,
        "folder": str(folder),
        "is_new": is_new,
        "seconds": time.perf_counter() - start,
    }
    if arguments.json != "-":
        print(
            f"{folder}: {SHAPES[name].num_parameters / 1e6:.1f} M parameters, "
            f"{SHAPES[name].num_active_parameters / 1e6:.1f} M active, {num_bytes / 1e9:.2f} GB, "
            f"{'written' if is_new else 'was there already'}"
        )
    write_json(arguments.json, record)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mid")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: the cache folder")
    add_common_arguments(parser, quick="write the tiny shape")
    return parser.parse_args()


def ensure_checkpoint(folder: Path, shape: Shape) -> bool:
    """Write the checkpoint unless it is there; returns whether it was written. It appears whole or not at all."""
    if (folder / "config.json").exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_tokenizer(unfinished, shape)
        _write_model(unfinished, shape)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return True


def _write_model(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_config: Any = Qwen3MoeConfig  # its signature does not name the attributes that every config takes
    config = make_config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_token,
        moe_intermediate_size=shape.expert_width,
        intermediate_size=shape.expert_width,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.context,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(SEED)
    with tqdm(total=shape.num_parameters, desc="Drawing weights", unit="", unit_scale=True) as bar:
        for name, parameter in model.named_parameters():
            _draw(name, parameter.data, generator)
            bar.update(parameter.numel())
    model.save_pretrained(folder, max_shard_size="500MB")
    # transformers 5 writes `num_local_experts` only; other readers of this architecture ask for `num_experts`.
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"num_experts": shape.num_experts}
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def _draw(name: str, weight: Any, generator: Any) -> None:
    """Scales that keep hidden states near 1 and routing decisive."""
    if name.endswith("norm.weight"):
        weight.fill_(1.0)
    elif "embed_tokens" in name:
        weight.normal_(std=EMBEDDING_STD, generator=generator)
    else:
        weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    tokenizer = train_tokenizer(_texts(), vocab_size=shape.vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _texts() -> list[Domain]:
    pages = [path.read_text(encoding="utf-8") for path in [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]]
    sources = sample_sources(python_files(), TOKENIZER_BYTES, seed=SEED)
    return [
        split_domain(documents, name=name, origin=name, licence="", is_code=is_code)
        for documents, name, is_code in ((pages, "documentation", False), (sources, "Python sources", True))
    ]


if __name__ == "__main__":
    main()
