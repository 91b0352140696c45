"""Which architectures are served: the Hugging Face class to its family."""

from collections.abc import Mapping

from moeserve.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from moeserve.models.families.family import Family
from moeserve.models.families.gpt_oss import GPT_OSS
from moeserve.models.families.mixtral import MIXTRAL
from moeserve.models.families.olmoe import OLMOE
from moeserve.models.families.qwen2_moe import QWEN2_MOE
from moeserve.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "OlmoeForCausalLM": OLMOE,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "GptOssForCausalLM": GPT_OSS,
}
