"""Logits of a step's sequences to their next tokens; every row by its own settings, none by its neighbours.

Order: logit_bias, min_tokens, penalties, then (`moeserve_kernels.sample`) temperature, top_k, top_p, min_p and noise.
Log-probabilities are those of the logits before all that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeserve.engine.outputs import SampledToken, TokenLogprobs
from moeserve.engine.sampling_params import SamplingParams
from moeserve.worker.input_batch import SequenceView
from moeserve.worker.logprobs import token_logprobs
from moeserve_kernels import apply_penalties, sample


@dataclass(frozen=True, slots=True, kw_only=True)
class _SettingsTensors:
    """The settings of R sequences, on the device; a function of their SamplingParams alone."""

    params: tuple[SamplingParams, ...]
    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    seed_R: torch.Tensor
    bias_rows: torch.Tensor
    bias_token_ids: torch.Tensor
    biases: torch.Tensor
    penalised_rows: tuple[int, ...]
    """The penalties below are of these rows only."""
    penalised_rows_r: torch.Tensor
    presence_penalty_r: torch.Tensor
    frequency_penalty_r: torch.Tensor
    repetition_penalty_r: torch.Tensor

    @staticmethod
    def build(params: tuple[SamplingParams, ...], device: torch.device) -> "_SettingsTensors":
        def floats(values: Iterable[float]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.float32, device=device)

        def ints(values: Iterable[int | None]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        biases = [(row, *bias) for row, p in enumerate(params) for bias in p.logit_bias.items()]
        penalised = tuple(row for row, p in enumerate(params) if p.needs_output_history)
        return _SettingsTensors(
            params=params,
            temperature_R=floats(p.temperature for p in params),
            top_k_R=ints(p.top_k for p in params),
            top_p_R=floats(p.top_p for p in params),
            min_p_R=floats(p.min_p for p in params),
            seed_R=ints(p.seed for p in params),
            bias_rows=ints(row for row, _, _ in biases),
            bias_token_ids=ints(token_id for _, token_id, _ in biases),
            biases=floats(bias for _, _, bias in biases),
            penalised_rows=penalised,
            penalised_rows_r=ints(penalised),
            presence_penalty_r=floats(params[row].presence_penalty for row in penalised),
            frequency_penalty_r=floats(params[row].frequency_penalty for row in penalised),
            repetition_penalty_r=floats(params[row].repetition_penalty for row in penalised),
        )


class Sampler:
    """Chooses tokens on the leader. Between steps it keeps nothing but the last settings' tensors."""

    def __init__(self, *, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._settings: _SettingsTensors | None = None

    def sample(self, logits_RV: torch.Tensor, sequences: Sequence[SequenceView]) -> list[SampledToken]:
        """The next token of each sequence; row r of the float32 logits belongs to `sequences[r]`."""
        settings = self._settings_of(sequences, logits_RV.device)
        processed_RV = self._process(logits_RV, sequences, settings)
        positions = [len(sequence.token_ids) for sequence in sequences]
        token_ids_R = sample(
            processed_RV,
            temperature_R=settings.temperature_R,
            top_k_R=settings.top_k_R,
            top_p_R=settings.top_p_R,
            min_p_R=settings.min_p_R,
            seed_R=settings.seed_R,
            position_R=torch.tensor(positions, dtype=torch.int64, device=logits_RV.device),
        )
        logprobs = _sampled_logprobs(logits_RV, token_ids_R, settings.params)
        return [
            SampledToken(request_id=sequence.request_id, token_id=token_id, logprobs=logprobs.get(row))
            for row, (sequence, token_id) in enumerate(zip(sequences, token_ids_R.tolist(), strict=True))
        ]

    def _settings_of(self, sequences: Sequence[SequenceView], device: torch.device) -> _SettingsTensors:
        """Built anew only when the batch has changed; while it decodes, the same params come in the same order."""
        params = tuple(sequence.params for sequence in sequences)
        if self._settings is None or self._settings.params != params:
            self._settings = _SettingsTensors.build(params, device)
        return self._settings

    def _process(
        self, logits_RV: torch.Tensor, sequences: Sequence[SequenceView], settings: _SettingsTensors
    ) -> torch.Tensor:
        """Logits to sample from: new ones, or the given ones where no sequence asks for a change."""
        masked = self._masked_tokens(sequences, vocab_size=logits_RV.shape[1])
        if not (len(settings.biases) or masked or settings.penalised_rows):
            return logits_RV
        logits_RV = logits_RV.clone()
        if len(settings.biases):
            index = (settings.bias_rows, settings.bias_token_ids)
            logits_RV.index_put_(index, settings.biases, accumulate=True)
        if masked:
            rows, token_ids = torch.tensor(masked, dtype=torch.int64, device=logits_RV.device).T
            logits_RV[rows, token_ids] = -torch.inf
        if settings.penalised_rows:
            _penalise(logits_RV, sequences, settings)
        return logits_RV

    def _masked_tokens(self, sequences: Sequence[SequenceView], *, vocab_size: int) -> list[tuple[int, int]]:
        """(row, token id) of the tokens that would end a sequence before its `min_tokens`."""
        masked = []
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if len(sequence.output_token_ids) < params.min_tokens:
                ending = params.stop_token_ids if params.ignore_eos else (*self._eos_token_ids, *params.stop_token_ids)
                masked += [(row, token_id) for token_id in ending if 0 <= token_id < vocab_size]
        return masked


def _penalise(logits_RV: torch.Tensor, sequences: Sequence[SequenceView], settings: _SettingsTensors) -> None:
    """Apply the penalties of the penalised rows, in place."""
    penalised = [sequences[row] for row in settings.penalised_rows]
    start_loc = np.cumsum([0, *(len(s.token_ids) for s in penalised)], dtype=np.int64)
    num_prompt_tokens = np.array([s.num_prompt_tokens for s in penalised], dtype=np.int64)

    def to_device(values: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> torch.Tensor:
        return torch.from_numpy(values).to(logits_RV.device, non_blocking=True)

    apply_penalties(
        logits_RV,
        rows_r=settings.penalised_rows_r,
        token_ids=to_device(np.concatenate([s.token_ids for s in penalised]).astype(np.int64)),
        start_loc=to_device(start_loc),
        num_prompt_tokens_r=to_device(num_prompt_tokens),
        presence_penalty_r=settings.presence_penalty_r,
        frequency_penalty_r=settings.frequency_penalty_r,
        repetition_penalty_r=settings.repetition_penalty_r,
    )


def _sampled_logprobs(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """By row, for the rows that asked for log-probabilities."""
    num_top = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
    if not num_top:
        return {}
    rows = torch.tensor(list(num_top), dtype=torch.int64, device=logits_RV.device)
    records = token_logprobs(logits_RV[rows], token_ids_R[rows], list(num_top.values()))
    return dict(zip(num_top, records, strict=True))
