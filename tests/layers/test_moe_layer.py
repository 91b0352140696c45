"""The whole MoE layer against a float64 oracle made of the kernels' references, in every layout and placement."""

import dataclasses

import pytest
import torch

from moeserve.experts.dispatcher import build_dispatcher
from moeserve.experts.load_recorder import LayerLoad
from moeserve.layers.forward_batch import ForwardBatch
from moeserve.layers.moe.layer import MoeLayer, load_moe_layer
from moeserve.models.parameters import DictReader
from moeserve.models.spec import ModelSpec, MoeSpec
from moeserve.parallel import ParallelContext, single_rank_context
from moeserve.testing.placements import random_placement
from moeserve.testing.thread_ranks import ThreadGroup, run_thread_ranks
from moeserve.testing.tiny_models import Style, forward_batch, random_parameters, tiny_spec
from moeserve_kernels.fused_moe.reference import fused_moe_reference
from moeserve_kernels.topk_routing.reference import topk_routing_reference
from moeserve_placement import ExpertPlacement

STYLES: list[Style] = ["qwen3", "qwen2", "deepseek", "gpt_oss"]
LAYER = 1
PREFIX = f"layers.{LAYER}.moe"


def moe_spec(spec: ModelSpec) -> MoeSpec:
    mlp = spec.layers[LAYER].mlp
    assert isinstance(mlp, MoeSpec)
    return mlp


def expected_output(spec: ModelSpec, hidden_TD: torch.Tensor) -> torch.Tensor:
    """Every token through its experts and the shared ones, in float64."""
    mlp, router = moe_spec(spec), moe_spec(spec).router
    full = {name: tensor.double() for name, tensor in random_parameters(spec).items() if name.startswith(PREFIX)}
    x_TD = hidden_TD.double()
    logits_TE = x_TD @ full[f"{PREFIX}.gate.weight"].T + full.get(f"{PREFIX}.gate.bias", torch.tensor(0.0))
    weights_TK, expert_ids_TK = topk_routing_reference(
        logits_TE,
        top_k=router.top_k,
        scoring=router.scoring,
        renormalize=router.renormalize,
        scaling_factor=router.scaling_factor,
        num_groups=router.num_groups,
        num_selected_groups=router.num_selected_groups,
        group_score=router.group_score,
        correction_bias_E=full.get(f"{PREFIX}.gate.correction_bias"),
    )
    out_TD = fused_moe_reference(
        x_TD,
        weights_TK,
        expert_ids_TK,
        full[f"{PREFIX}.experts.gate_up_proj"],
        full[f"{PREFIX}.experts.down_proj"],
        activation=mlp.activation.kind,
        gate_up_bias_p2F=full.get(f"{PREFIX}.experts.gate_up_bias"),
        down_bias_pD=full.get(f"{PREFIX}.experts.down_bias"),
    )
    if mlp.shared_intermediate_size:
        gate_TF = x_TD @ full[f"{PREFIX}.shared_expert.gate_proj.weight"].T
        up_TF = x_TD @ full[f"{PREFIX}.shared_expert.up_proj.weight"].T
        inner_TF = gate_TF * gate_TF.sigmoid() * up_TF
        shared_TD = inner_TF @ full[f"{PREFIX}.shared_expert.down_proj.weight"].T
        if mlp.shared_gate:
            shared_TD = shared_TD * (x_TD @ full[f"{PREFIX}.shared_gate.weight"].T).sigmoid()
        out_TD = out_TD + shared_TD
    return out_TD


def batch_of(num_tokens: int, num_tokens_by_dp_rank: tuple[int, ...] | None = None) -> ForwardBatch:
    """A step of which the layer reads the token counts only."""
    return forward_batch([[0] * num_tokens], num_tokens_by_dp_rank=num_tokens_by_dp_rank)


def load(
    spec: ModelSpec,
    parallel: ParallelContext,
    placement: ExpertPlacement,
    dtype: torch.dtype = torch.float32,
) -> MoeLayer:
    return load_moe_layer(
        moe_spec(spec),
        DictReader(random_parameters(spec), dtype=dtype),
        PREFIX,
        placement,
        spec.moe_layer_ids.index(LAYER),
        parallel=parallel,
        dispatcher=build_dispatcher(parallel, top_k=moe_spec(spec).router.top_k),
    )


def place(spec: ModelSpec, num_ranks: int, num_redundant_experts: int = 0, seed: int = 0) -> ExpertPlacement:
    return random_placement(
        num_layers=len(spec.moe_layer_ids),
        num_experts=spec.num_experts,
        num_ranks=num_ranks,
        num_redundant_experts=num_redundant_experts,
        seed=seed,
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("tp_size", "dp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)])
def test_output_is_that_of_the_oracle(style: Style, tp_size: int, dp_size: int) -> None:
    spec = tiny_spec(style, num_experts=8)
    hidden_TD = torch.randn(9, spec.hidden_size, generator=torch.Generator().manual_seed(1))
    expected_TD = expected_output(spec, hidden_TD)
    tokens_by_dp_rank = [slice(0, 5), slice(5, 9), slice(9, 9)][:dp_size] if dp_size > 1 else [slice(None)]
    for num_redundant_experts in {0, min(5, 8 * (tp_size * dp_size - 1))}:
        placement = place(spec, tp_size * dp_size, num_redundant_experts, seed=num_redundant_experts)

        def run(parallel: ParallelContext, placement: ExpertPlacement = placement) -> torch.Tensor:
            tokens = tokens_by_dp_rank[parallel.layout.dp_rank]
            lengths = tuple(len(hidden_TD[tokens]) for tokens in tokens_by_dp_rank)
            return load(spec, parallel, placement).forward(hidden_TD[tokens], batch_of(len(hidden_TD[tokens]), lengths))

        for rank, out_TD in enumerate(run_thread_ranks(run, tp_size=tp_size, dp_size=dp_size)):
            wanted_TD = expected_TD[tokens_by_dp_rank[rank // tp_size]].float()
            torch.testing.assert_close(out_TD, wanted_TD, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_experts", "tp_size", "dp_size"), [(16, 1, 3), (16, 3, 1), (5, 2, 2), (5, 1, 4)])
def test_the_sum_does_not_depend_on_the_placement(num_experts: int, tp_size: int, dp_size: int) -> None:
    spec = tiny_spec(num_experts=num_experts, top_k=3)
    hidden_TD = torch.randn(7, spec.hidden_size, generator=torch.Generator().manual_seed(2))
    outputs = []
    for seed in range(3):
        placement = place(spec, tp_size * dp_size, num_redundant_experts=seed, seed=seed)

        def run(parallel: ParallelContext, placement: ExpertPlacement = placement) -> torch.Tensor:
            return load(spec, parallel, placement).forward(hidden_TD, batch_of(7, (7,) * dp_size))

        outputs.append(run_thread_ranks(run, tp_size=tp_size, dp_size=dp_size))
    for others in outputs[1:]:
        for out_TD, other_TD in zip(outputs[0], others, strict=True):
            torch.testing.assert_close(out_TD, other_TD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", ["qwen3", "qwen2"])
def test_shared_experts_cost_no_collective_of_their_own(style: Style) -> None:
    spec = tiny_spec(style)

    def run(parallel: ParallelContext) -> list[str]:
        load(spec, parallel, place(spec, 4)).forward(torch.ones(3, spec.hidden_size), batch_of(3, (3, 3)))
        groups = (parallel.tp, parallel.dp, parallel.ep)
        return [call for group in groups if isinstance(group, ThreadGroup) for call in group.calls]

    calls = ["all_reduce", "all_gather", "reduce_scatter"]
    assert run_thread_ranks(run, tp_size=2, dp_size=2) == [calls] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layer_routes_in_float32(dtype: torch.dtype) -> None:
    spec = tiny_spec("qwen3")
    layer = load(spec, single_rank_context(), place(spec, 1), dtype=dtype)
    hidden_TD = torch.randn(4, spec.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    weights_TK, expert_ids_TK = layer.router.forward(hidden_TD)
    logits_TE = hidden_TD.double() @ random_parameters(spec)[f"{PREFIX}.gate.weight"].double().T
    expected_TK, expected_ids_TK = topk_routing_reference(logits_TE, top_k=2, scoring="softmax", renormalize=True)
    assert torch.equal(expert_ids_TK, expected_ids_TK)
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-5, atol=1e-6)
    assert layer.forward(hidden_TD, batch_of(4)).dtype == dtype


@pytest.mark.parametrize("style", STYLES)
def test_no_token_on_one_rank(style: Style) -> None:
    spec = tiny_spec(style)
    layer = load(spec, single_rank_context(), place(spec, 1))
    assert layer.forward(torch.empty(0, spec.hidden_size), batch_of(0)).shape == (0, spec.hidden_size)


def test_tables_and_store_are_replaced_together_between_steps() -> None:
    """What a committed migration does: a new epoch's tables and store, and the output stays."""
    spec = tiny_spec()
    hidden_TD = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(4))

    def run(parallel: ParallelContext) -> None:
        layer = load(spec, parallel, place(spec, 2, num_redundant_experts=3))
        batch = batch_of(5, (5, 5))
        before_TD = layer.forward(hidden_TD.clone(), batch)
        moved = load(spec, parallel, place(spec, 2, num_redundant_experts=3, seed=8))
        layer.tables.take_over(moved.tables)
        layer.experts.store = moved.experts.store
        torch.testing.assert_close(layer.forward(hidden_TD.clone(), batch), before_TD, rtol=1e-5, atol=1e-5)

    run_thread_ranks(run, dp_size=2)


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (6,), (1, 1, 5), ()])
@pytest.mark.parametrize("style", STYLES)
def test_choices_are_counted_by_phase(style: Style, query_lens: tuple[int, ...]) -> None:
    """Each replica counts its own tokens, whatever the others do."""
    spec = tiny_spec(style)
    num_tokens, num_decode = sum(query_lens), query_lens.count(1)
    hidden_TD = torch.randn(num_tokens, spec.hidden_size, generator=torch.Generator().manual_seed(5))

    def run(parallel: ParallelContext) -> None:
        layer = load(spec, parallel, place(spec, 2))
        seconds: list[float] = []
        load_2E = torch.zeros(2, spec.num_experts, dtype=torch.int64)
        layer.load = LayerLoad(load_2E, seconds.append)
        mine = hidden_TD if parallel.layout.dp_rank == 0 else hidden_TD[:0]
        batch = batch_of(len(mine), (num_tokens, 0))
        lens = query_lens if parallel.layout.dp_rank == 0 else ()
        layer.forward(mine, dataclasses.replace(batch, query_lens=lens))
        expert_ids_TK = layer.router.forward(mine)[1]
        prefill, decode = expert_ids_TK[num_decode:], expert_ids_TK[:num_decode]
        for counted_E, chosen in zip(load_2E, (prefill, decode), strict=True):
            assert counted_E.tolist() == torch.bincount(chosen.flatten(), minlength=spec.num_experts).tolist()
        assert len(seconds) == 1

    run_thread_ranks(run, dp_size=2)
