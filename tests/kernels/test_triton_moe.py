"""Triton moe_align and fused_moe: odd routings against the oracles, poisoned buffers, rows that know no batch."""

from typing import Any

import pytest
import torch

from moeserve_kernels.fused_moe import triton as launcher
from moeserve_kernels.fused_moe.reference import fused_moe_reference
from moeserve_kernels.fused_moe.triton import fused_moe
from moeserve_kernels.moe_align.reference import moe_align_reference
from moeserve_kernels.moe_align.triton import moe_align, sort_rows
from moeserve_kernels.silu_and_mul.reference import silu_and_mul_reference
from moeserve_kernels.tuning import Tuning

EXPERTS, WIDTH, HIDDEN = 5, 24, 40
TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2}
"""Smaller than every axis of the tests, and no divisor of the widths."""


def _tuning(**tile: int) -> Tuning:
    classes = [f"{p}/{d}" for p in ("gate_up", "down") for d in ("float32", "half/decode", "int8/decode")]
    return {**{name: {**TILE, **tile} for name in classes}, "combine": {"BLOCK_D": 16}}


@pytest.mark.parametrize("num_experts", [1, 7, 70])
@pytest.mark.parametrize("num_rows", [0, 1, 127, 400])
def test_moe_align(num_rows: int, num_experts: int, triton_device: torch.device) -> None:
    """400 rows are more than three chunks; ids of -1 among them; more experts than one program sums."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(-1, num_experts, (num_rows,), generator=generator)
    order, counts = moe_align(ids.to(triton_device), num_experts)
    expected_order, expected_counts = moe_align_reference(ids, num_experts)
    assert order.dtype == counts.dtype == torch.int64
    assert torch.equal(order.cpu(), expected_order)
    assert torch.equal(counts.cpu(), expected_counts)


@pytest.mark.parametrize("tile_rows", [1, 16])
@pytest.mark.parametrize("ids", [[0] * 40, [3] * 17 + [-1] * 3, [-1] * 5, list(range(4)) * 8], ids=str)
def test_tiles_cover_every_row_of_ours_once(ids: list[int], tile_rows: int, triton_device: torch.device) -> None:
    rows = sort_rows(torch.tensor(ids, device=triton_device), 4, tile_rows=tile_rows)
    order, covered = rows.order_R.tolist(), []
    for expert, first, count in rows.tiles_B3.tolist():
        if expert >= 0:
            assert 1 <= count <= tile_rows
            assert all(ids[row] == expert for row in order[first : first + count])
            covered += order[first : first + count]
    assert sorted(covered) == [row for row, expert in enumerate(ids) if expert >= 0]


def _parameters(device: torch.device, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    weights = {
        "gate_up_proj_p2FD": randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5,
        "down_proj_pDF": randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5,
    }
    if bias:
        weights |= {"gate_up_bias_p2F": randn(EXPERTS, 2 * WIDTH), "down_bias_pD": randn(EXPERTS, HIDDEN)}
    return weights


def _inputs(
    num_tokens: int, top_k: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).to(device, dtype)
    return hidden, torch.rand(num_tokens, top_k, generator=generator).to(device)


ROUTINGS = {
    "one_token": [[3, 1]],
    "more_rows_of_one_expert_than_a_tile": [[2, 2]] * 19,
    "nothing_is_ours": [[-1, -1], [-1, -1]],
    "some_are_ours": [[-1, 4], [0, -1], [-1, -1], [0, 4]],
    "first_and_last_expert_idle": [[1, 2], [3, 1], [2, 3]],
    "no_tokens": [],
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("activation", ["silu", "swiglu_clamped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_fused_moe(
    routing: str,
    activation: str,
    bias: bool,
    dtype: torch.dtype,
    tolerance: float,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every buffer is full of NaN before the kernels write it."""
    _poison_new_tensors(monkeypatch)
    ids = torch.tensor(ROUTINGS[routing], dtype=torch.int64).reshape(-1, 2).to(triton_device)
    hidden, weights = _inputs(len(ids), 2, triton_device, dtype)
    parameters = _parameters(triton_device, dtype, bias=bias)
    options = {"activation": activation, "alpha": 1.5, "limit": 1.0}  # a limit that clamps
    actual = fused_moe(hidden, weights, ids, **parameters, **options, tuning=_tuning())
    expected = fused_moe_reference(hidden, weights, ids, **parameters, **options)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def _poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Any) -> Any:
        def new(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made.fill_(torch.nan if made.is_floating_point() else 1 << 20)

        return new

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def test_int8_weights_have_a_scale_for_each_channel(triton_device: torch.device) -> None:
    ids = torch.tensor([[0, 3], [4, -1], [2, 0]], device=triton_device)
    hidden, weights = _inputs(3, 2, triton_device)
    quantized: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for name, weight in _parameters(triton_device).items():
        scale = weight.abs().amax(dim=2) / 127
        quantized[name] = (weight / scale.unsqueeze(2)).round().to(torch.int8)
        quantized["gate_up_scale" if name.startswith("gate") else "down_scale"] = scale
        rounded[name] = quantized[name] * scale.unsqueeze(2)
    actual = fused_moe(hidden, weights, ids, **quantized, tuning=_tuning())
    expected = fused_moe_reference(hidden, weights, ids, **rounded)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", [{}, {"BLOCK_M": 32, "BLOCK_N": 32, "GROUP_M": 1}])
def test_a_row_knows_no_batch_and_no_tile(tile: dict[str, int], triton_device: torch.device) -> None:
    """Alone, among others and with another tile size: the same bits, because the inner axis is cut alike."""
    ids = torch.randint(0, EXPERTS, (20, 3), generator=torch.Generator().manual_seed(0)).to(triton_device)
    hidden, weights = _inputs(20, 3, triton_device)
    parameters = _parameters(triton_device, bias=True)
    together = fused_moe(hidden, weights, ids, **parameters, tuning=_tuning())
    for row in (0, 7, 19):
        one = slice(row, row + 1)
        alone = fused_moe(hidden[one], weights[one], ids[one], **parameters, tuning=_tuning(**tile))
        assert torch.equal(alone[0], together[row])


def test_order_of_experts_in_memory_does_not_matter(triton_device: torch.device) -> None:
    ids = torch.randint(0, EXPERTS, (9, 3), generator=torch.Generator().manual_seed(0)).to(triton_device)
    hidden, weights = _inputs(9, 3, triton_device)
    parameters = _parameters(triton_device)
    places = torch.tensor([3, 0, 4, 2, 1], device=triton_device)  # expert e lies at places[e]
    moved = {name: torch.empty_like(x).index_copy_(0, places, x) for name, x in parameters.items()}
    assert torch.equal(
        fused_moe(hidden, weights, places[ids], **moved, tuning=_tuning()),
        fused_moe(hidden, weights, ids, **parameters, tuning=_tuning()),
    )


def _quantize_blocks(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(float8 values, scales, what they stand for) of a matrix cut into blocks of rows x 128, the last ones smaller."""
    stands_for, blocks = torch.empty_like(x), []
    narrow = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], 128):
            block = (slice(top, top + rows), slice(left, left + 128))
            scale = x[block].abs().amax() / 448
            narrow[block] = (x[block] / scale).to(torch.float8_e4m3fn)
            stands_for[block] = narrow[block].float() * scale
            blocks.append(scale)
    return narrow, torch.stack(blocks).view(-(-x.shape[0] // rows), -1), stands_for


def test_float8_weights_have_a_scale_for_each_block(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of two blocks, the second one ragged; blocks of very different sizes. Rows are narrowed by torch: the
    interpreter loses the carry of a float8 that rounds up to a power of two."""
    hidden_size, width = 200, 160
    generator = torch.Generator().manual_seed(0)
    steps = torch.tensor([0.1, 1.0, 8.0]).repeat_interleave(128)
    shapes = {"gate_up": (2 * width, hidden_size), "down": (hidden_size, width)}
    tensors: dict[str, torch.Tensor] = {}
    stands_for: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in shapes.items():
        weights = torch.randn(2, rows, columns, generator=generator) * steps[:rows, None] * steps[:columns] / 40
        values, scales, rounded = zip(*(_quantize_blocks(x.to(triton_device), 128) for x in weights), strict=True)
        parameter = "gate_up_proj_p2FD" if name == "gate_up" else "down_proj_pDF"
        tensors |= {parameter: torch.stack(values), f"{name}_scale": torch.stack(scales)}
        stands_for[parameter] = torch.stack(rounded)
    narrowed: list[torch.Tensor] = []

    def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales, rounded = _quantize_blocks(x, 1)
        narrowed.append(rounded)
        return values, scales

    monkeypatch.setattr(launcher, "_quantize_groups", quantize_groups)
    hidden = torch.randn(3, hidden_size, generator=generator).to(triton_device)
    ids, weights_TK = torch.tensor([[0], [1], [0]], device=triton_device), torch.ones(3, 1, device=triton_device)
    classes = {f"{name}/float8/decode": {**TILE, "BLOCK_K": 64} for name in shapes}
    actual = fused_moe(hidden, weights_TK, ids, **tensors, tuning={**classes, "combine": {"BLOCK_D": 64}})
    inner = narrowed[1]
    expected = torch.stack(
        [stands_for["down_proj_pDF"][ids[row, 0]].double() @ inner[row].double() for row in range(3)]
    )
    gate_up = torch.stack([stands_for["gate_up_proj_p2FD"][ids[row, 0]] @ narrowed[0][row] for row in range(3)])
    expected_inner = _quantize_blocks(silu_and_mul_reference(gate_up).float(), 1)[2]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(inner, expected_inner, rtol=0.13, atol=1e-3)  # neighbours of a rounding edge may differ


def test_rows_become_float8_by_groups_of_128(triton_device: torch.device) -> None:
    """To the bit where values lie on the grid of float8; a group of zeros has scale 1."""
    numbers = torch.randint(0, 256, (3, 200), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    wide = numbers.view(torch.float8_e4m3fn).float().nan_to_num(1.0).to(triton_device)
    wide[:, [5, 150]] = 448.0
    wide[1, :128] = 0.0
    narrow, scale = launcher._quantize_groups(wide * torch.tensor([[2.0], [1.0], [0.25]], device=triton_device))
    assert torch.equal(narrow.float(), wide)
    assert scale.tolist() == [[2.0, 2.0], [1.0, 1.0], [0.25, 0.25]]


def test_weights_without_a_configuration_are_refused(triton_device: torch.device) -> None:
    """float8 on a GPU without float8."""
    weights = torch.empty(1, 32, 16, device=triton_device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="float8"):
        fused_moe(
            torch.zeros(1, 16, device=triton_device),
            torch.ones(1, 1, device=triton_device),
            torch.zeros(1, 1, dtype=torch.int64, device=triton_device),
            weights,
            weights[:, :16],
            tuning=_tuning(),
        )
