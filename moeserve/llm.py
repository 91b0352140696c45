"""A model in this process, without a server: the same engine on one rank.

>>> from moeserve import LLM, SamplingParams
>>> llm = LLM("demo")
>>> [result.text for result in llm.generate(["Once upon a time", "def main("], SamplingParams(max_tokens=32))]
"""

import dataclasses
import logging
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tqdm import tqdm

from moeserve.config import CacheConfig, Config, ConfigError, ModelConfig, SchedulerConfig, config_from_dict
from moeserve.engine.core import EngineCore
from moeserve.engine.detokenizer import Detokenizer
from moeserve.engine.messages import AddRequest
from moeserve.engine.outputs import FinishReason, ReplicaStats, RequestOutput, TokenLogprobs
from moeserve.engine.sampling_params import SamplingParams, child_seed
from moeserve.engine.scheduler import Scheduler
from moeserve.ids import RequestId
from moeserve.models.checkpoint import resolve_model_folder
from moeserve.models.hf_config import read_model_spec
from moeserve.parallel import single_rank_context
from moeserve.tokenizer import Tokenizer, load_tokenizer
from moeserve.worker.channel import LeaderChannel
from moeserve.worker.device import load_native_kernels, resolve_device
from moeserve.worker.graph_recorder import graph_recorder_of
from moeserve.worker.worker import LeaderExecutor, build_worker

logger = logging.getLogger(__name__)

_SECTIONS = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionResult:
    """One finished sequence."""

    text: str
    token_ids: list[int]
    """Output tokens, up to the one that ended the text."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop token id or string that ended it; None for the end-of-sequence token."""
    logprobs: list[TokenLogprobs] | None
    """One for each output token, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None
    """One for each prompt token but the first, when asked for."""
    prompt_token_ids: list[int]
    index: int
    """0 to n - 1 among the sequences of one prompt."""


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A sequence on its way, and what has come of it."""

    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    detokenizer: Detokenizer
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def take(self, output: RequestOutput) -> None:
        """Add the news; sets `finish_reason` when the sequence has ended, by the engine's word or a stop string."""
        assert output.error is None, output.error
        news = self.detokenizer.append(output.new_token_ids)
        self.pieces.append(news.text)
        self.token_ids += output.new_token_ids[: news.num_tokens]
        self.logprobs += (output.logprobs or [])[: news.num_tokens]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if news.stop_reason is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, news.stop_reason
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.pieces.append(self.detokenizer.finish())

    def result(self) -> CompletionResult:
        assert self.finish_reason is not None
        return CompletionResult(
            text="".join(self.pieces),
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_token_ids=self.prompt_token_ids,
            index=self.index,
        )


class LLM:
    """A loaded model. `settings` are those of the config's sections model, cache and scheduler, by their bare names.

    Raises ConfigError for a model or a setting that cannot be, and CheckpointError for a broken checkpoint.
    """

    def __init__(self, model: str = "demo", *, dtype: str = "auto", **settings: Any) -> None:
        config = _config_of({"model": model, "dtype": dtype} | settings)
        folder = resolve_model_folder(model)
        spec = read_model_spec(folder)
        device = resolve_device(config.model.device)
        reason = load_native_kernels(device)
        if reason is not None:
            logger.warning("%s", reason)
        parallel = single_rank_context(device)
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self._config = config
        self._spec = spec
        self._worker = build_worker(config, spec, folder, parallel, progress=True)
        self._worker.capture_decode(graph_recorder_of(device), progress=True)
        self._core = self._new_core()
        self._request_numbers = count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[CompletionResult]:
        """Continue each prompt (text, or token ids); with n > 1 its n results stand one after another.

        sampling_params: for all prompts, or one for each. Raises ValueError for prompts and settings that do not fit
        each other, the vocabulary or the context.
        """
        texts = [prompts] if isinstance(prompts, str) else prompts
        encoded = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in texts]
        return self._run(encoded, _one_for_each(sampling_params, len(encoded)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[CompletionResult]:
        """The assistant's next message of one conversation, or of each of several; otherwise like `generate`."""
        one = all(isinstance(message, Mapping) for message in messages)
        conversations: Sequence[Any] = [messages] if one else messages
        rendered = [self.tokenizer.apply_chat_template(conversation) for conversation in conversations]
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in rendered]
        return self._run(encoded, _one_for_each(sampling_params, len(encoded)), use_tqdm)

    def stats(self) -> ReplicaStats:
        """State of the engine after its last step."""
        return self._core.stats()

    def _run(
        self, prompts: list[list[int]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[CompletionResult]:
        for prompt, prompt_params in zip(prompts, params, strict=True):
            self._check(prompt, prompt_params)
        sequences: dict[RequestId, _Sequence] = {}
        for prompt, prompt_params in zip(prompts, params, strict=True):
            sequences |= self._add(prompt, prompt_params)
        try:
            with tqdm(total=len(sequences), desc="Generating", unit="seq", disable=not use_tqdm) as bar:
                while self._core.has_unfinished:
                    bar.update(self._step(sequences))
        except BaseException:
            # Interrupted in the midst of a step, which no one can finish: the next call starts afresh.
            self._worker.forget_all()
            self._core = self._new_core()
            raise
        return [sequence.result() for sequence in sequences.values()]

    def _step(self, sequences: Mapping[RequestId, _Sequence]) -> int:
        """One step of the engine; returns how many sequences ended in it."""
        finished = []
        for output in self._core.step():
            sequence = sequences[output.request_id]
            sequence.take(output)
            if sequence.finish_reason is not None:
                finished.append(output.request_id)
        self._core.abort(finished)  # a stop string is news to the engine
        return len(finished)

    def _add(self, prompt: list[int], params: SamplingParams) -> dict[RequestId, _Sequence]:
        """Hand the n sequences of a prompt to the engine."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        added = {}
        for index in range(params.n):
            request_id = RequestId(f"llm-{next(self._request_numbers)}")
            own_params = dataclasses.replace(params, n=1, seed=child_seed(seed, index))
            detokenizer = Detokenizer(
                self.tokenizer.decode,
                prompt,
                params.stop,
                params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            added[request_id] = _Sequence(
                index=index, prompt_token_ids=prompt, params=own_params, detokenizer=detokenizer
            )
            self._core.add(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=own_params))
        return added

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        _check_vocabulary("a prompt", prompt, self._spec.vocab_size)
        _check_vocabulary("logit_bias", params.logit_bias, self._spec.vocab_size)
        _check_vocabulary("stop_token_ids", params.stop_token_ids, self._spec.vocab_size)
        longest = self._worker.max_model_len - params.max_tokens
        if not 1 <= len(prompt) <= longest:
            raise ValueError(
                f"a prompt must have between 1 and {longest} tokens (the context of {self._worker.max_model_len} less "
                f"max_tokens {params.max_tokens}), got {len(prompt)}"
            )

    def _new_core(self) -> EngineCore:
        scheduler = Scheduler(
            self._config.scheduler,
            num_blocks=self._worker.num_blocks,
            block_size=self._config.cache.block_size,
            max_model_len=self._worker.max_model_len,
            eos_token_ids=self._spec.eos_token_ids,
            enable_prefix_caching=self._config.cache.enable_prefix_caching,
        )
        return EngineCore(scheduler, LeaderExecutor(self._worker, LeaderChannel()), time.monotonic)


def _config_of(settings: Mapping[str, Any]) -> Config:
    """Settings by bare name, each into the section that has it."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section = next(
            (s for s, owner in _SECTIONS.items() if name in {f.name for f in dataclasses.fields(owner)}), None
        )
        if section is None:
            known = [f.name for owner in _SECTIONS.values() for f in dataclasses.fields(owner)]
            raise ConfigError(f"unknown setting {name!r} of LLM; there are {', '.join(known)}")
        sections.setdefault(section, {})[name] = value
    return config_from_dict(sections)


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params must be one for all or one for each of {num_prompts} prompts, got {len(params)}"
        )
    return params


def _check_vocabulary(what: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token ids of {what} must be between 0 and {vocab_size - 1}, got {token_id}")
