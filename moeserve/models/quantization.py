"""Quantised checkpoint formats: what `quantization_config` may say and how a tensor is stored in them; no torch here.

FP8: a weight in float8_e4m3 beside `<name>_scale_inv`, one factor for each block of the last two axes, ragged at the
edges. MXFP4: rows of 4-bit e2m1 numbers, two to a byte (low half first) in `<name>_blocks` [..., C / 32, 16], and one
power of two for each 32 of them in `<name>_scales` [..., C / 32], biased by 127.
"""

from dataclasses import dataclass

from moeserve.models.raw_config import RawConfig

FP8_DTYPE = "F8_E4M3"
MXFP4_BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """What the reader has to know beside the tensors' own types."""

    fp8_block: tuple[int, int] = (128, 128)
    """Rows and columns that share a factor."""

    def fp8_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *lead, rows, columns = shape
        return (*lead, -(-rows // self.fp8_block[0]), -(-columns // self.fp8_block[1]))


def mxfp4_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the blocks and of the scales of a tensor."""
    *lead, columns = shape
    num_blocks = -(-columns // MXFP4_BLOCK)
    return (*lead, num_blocks, MXFP4_BLOCK // 2), (*lead, num_blocks)


def read_quantization(config: RawConfig) -> QuantizationConfig:
    """`quantization_config` of a `config.json`. Raises ConfigError for a format that is not read."""
    if "quantization_config" not in config:
        return QuantizationConfig()
    section = config.section("quantization_config")
    if section.choice("quant_method", "fp8", "mxfp4") == "mxfp4":
        return QuantizationConfig()
    section = section.with_defaults({"activation_scheme": "dynamic", "weight_block_size": [128, 128]}, {})
    section.choice("activation_scheme", "dynamic")
    match section.wholes("weight_block_size"):
        case (rows, columns) if rows > 0 and columns > 0:
            return QuantizationConfig(fp8_block=(rows, columns))
    raise section.refuse("weight_block_size", "two positive numbers: rows and columns of a block")
