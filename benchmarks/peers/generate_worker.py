"""A process that answers batches with transformers' `generate`: one JSON line in, one out.

    python generate_worker.py CHECKPOINT

In: {"prompts": [[ids], ...], "output_tokens": n}, prompts of one length. Out: {"seconds": s}. Ready: {"seconds": 0}.
"""

import json
import sys
import time
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    model.eval()
    _answer(answers, 0.0)
    for line in sys.stdin:
        request = json.loads(line)
        _answer(answers, _seconds(model, torch.tensor(request["prompts"]), request["output_tokens"]))


def _seconds(model: Any, prompts: torch.Tensor, output_tokens: int) -> float:
    start = time.perf_counter()
    outputs = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - start
    assert outputs.shape == (prompts.shape[0], prompts.shape[1] + output_tokens)
    return seconds


def _answer(stream: TextIO, seconds: float) -> None:
    stream.write(json.dumps({"seconds": seconds}) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
