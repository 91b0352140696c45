"""A folder's `config.json` (and `generation_config.json`) to a ModelSpec; neither torch nor transformers is needed."""

from pathlib import Path

from moeserve.models.quantization import read_quantization
from moeserve.models.raw_config import RawConfig
from moeserve.models.registry import FAMILIES
from moeserve.models.safetensors_header import find_dtype
from moeserve.models.spec import ModelSpec

SUPPORTED_ARCHITECTURES = tuple(FAMILIES)


def read_model_spec(folder: Path) -> ModelSpec:
    """The model that lies in `folder`.

    Raises ConfigError, in one line with file, key, value and what is accepted, for an unknown architecture, a missing
    or malformed value, and a feature that is not served.
    """
    raw = RawConfig.load(folder / "config.json")
    architecture = _read_architecture(raw)
    family = FAMILIES[architecture]
    config = raw.with_defaults(family.defaults, family.aliases)
    config.choice("hidden_act", "silu")
    read_quantization(config)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.whole("vocab_size"),
        hidden_size=config.whole("hidden_size"),
        rms_norm_eps=config.number("rms_norm_eps"),
        layers=family.read_layers(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        max_position_embeddings=config.whole("max_position_embeddings"),
        dtype=_read_dtype(config, folder),
        eos_token_ids=_read_eos(config, folder),
    )


def _read_architecture(config: RawConfig) -> str:
    for architecture in config.texts("architectures"):
        if architecture in FAMILIES:
            return architecture
    raise config.refuse("architectures", "one of " + ", ".join(SUPPORTED_ARCHITECTURES))


def _read_dtype(config: RawConfig, folder: Path) -> str:
    """`dtype`, by its older name `torch_dtype`; where neither is there, what the checkpoint is stored in."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    if key not in config:
        return find_dtype(folder) or "float32"
    return config.choice(key, "float32", "bfloat16", "float16")


def _read_eos(config: RawConfig, folder: Path) -> tuple[int, ...]:
    """Tokens that end a text: the generation config knows more of them (end of turn) than the model's config."""
    path = folder / "generation_config.json"
    if path.exists() and (eos := RawConfig.load(path).wholes("eos_token_id")):
        return eos
    return config.wholes("eos_token_id")
