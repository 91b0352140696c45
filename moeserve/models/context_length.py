"""How long a sequence may be: what was asked for, within what the model was made for; no torch here."""

from moeserve.config import Config, ConfigError
from moeserve.models.spec import ModelSpec


def resolve_max_model_len(config: Config, spec: ModelSpec) -> int:
    """Most tokens of prompt and output together. Raises ConfigError where the model has less context."""
    longest = spec.max_position_embeddings
    asked = config.model.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(
            f"model.max_model_len must be at most {longest}, the context of {config.model.model}, got {asked}"
        )
    return asked or longest
