"""Target networks, and what the author of another family imports (docs/adding-a-family.md).

A family is a file in `families` and a line below; `register_family` adds others from outside.
"""

from jaxspec_kernels.linear_recurrence.causal_conv import causal_conv, last_inputs

from jaxspec.attention import (
    FullAttention,
    PositionWise,
    Recurrence,
    Recurrent,
    SlidingWindow,
    StateShape,
)
from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.deepseek.deepseek import Deepseek
from jaxspec.models.families.deepseek.deepseek_v4 import DeepseekV4
from jaxspec.models.families.gemma.gemma3 import Gemma3
from jaxspec.models.families.gemma.gemma4 import Gemma4
from jaxspec.models.families.glm.glm4 import Glm4
from jaxspec.models.families.glm.glm4_moe_lite import Glm4MoeLite
from jaxspec.models.families.gpt_oss import GptOss
from jaxspec.models.families.granite import Granite
from jaxspec.models.families.lfm2 import Lfm2
from jaxspec.models.families.llama import Llama
from jaxspec.models.families.minimax_m2 import MiniMaxM2
from jaxspec.models.families.mistral import Mistral
from jaxspec.models.families.nemotron_h import NemotronH
from jaxspec.models.families.olmo.olmo2 import Olmo2
from jaxspec.models.families.olmo.olmo3 import Olmo3
from jaxspec.models.families.phi3 import Phi3
from jaxspec.models.families.qwen.qwen2 import Qwen2
from jaxspec.models.families.qwen.qwen3 import Qwen3
from jaxspec.models.families.qwen.qwen3_5 import Qwen3_5, Qwen3_5Moe
from jaxspec.models.families.qwen.qwen3_moe import Qwen3Moe
from jaxspec.models.families.qwen.qwen3_next import Qwen3Next
from jaxspec.models.families.qwen.qwen_vl import Qwen3VL, Qwen25VL
from jaxspec.models.families.smollm3 import SmolLM3
from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import (
    MLP,
    Attention,
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    SandwichLayer,
)
from jaxspec.models.registry import register_family
from jaxspec.models.target import load_target
from jaxspec.sharding import later_psum, local_part, split_over, total
from jaxspec.weights.loading import ModulePlan, export_tensors, plan_module
from jaxspec.weights.parameters import Fused, Projection, Whole, bias_parameter, parameter, product

__all__ = [
    "MLP",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "Deepseek",
    "DeepseekV4",
    "Embedding",
    "FullAttention",
    "Fused",
    "GGUFArchitecture",
    "Gemma3",
    "Gemma4",
    "Glm4",
    "Glm4MoeLite",
    "GptOss",
    "Granite",
    "Lfm2",
    "Linear",
    "Llama",
    "MiniMaxM2",
    "Mistral",
    "MoE",
    "ModelConfig",
    "ModulePlan",
    "NemotronH",
    "Olmo2",
    "Olmo3",
    "Phi3",
    "PositionWise",
    "Projection",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3VL",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Qwen25VL",
    "RMSNorm",
    "Recurrence",
    "Recurrent",
    "RopeConfig",
    "SandwichLayer",
    "SlidingWindow",
    "SmolLM3",
    "StateShape",
    "Whole",
    "bias_parameter",
    "causal_conv",
    "export_tensors",
    "last_inputs",
    "later_psum",
    "load_target",
    "local_part",
    "parameter",
    "plan_module",
    "product",
    "register_family",
    "rope_tables",
    "split_over",
    "total",
]

register_family("llama", Llama)
register_family("mistral", Mistral)
register_family("qwen2", Qwen2)
register_family("qwen3", Qwen3)
register_family("qwen3_moe", Qwen3Moe)
register_family("qwen3_next", Qwen3Next)
register_family("qwen3_5_text", Qwen3_5)
register_family("qwen3_5_moe_text", Qwen3_5Moe)
register_family("qwen2_5_vl_text", Qwen25VL)
register_family("qwen3_vl_text", Qwen3VL)
register_family("gemma3_text", Gemma3)
register_family("gemma4_text", Gemma4)
register_family("glm4", Glm4)
register_family("deepseek_v3", Deepseek)
register_family("deepseek_v4", DeepseekV4)
register_family("glm4_moe_lite", Glm4MoeLite)
register_family("gpt_oss", GptOss)
register_family("olmo2", Olmo2)
register_family("olmo3", Olmo3)
register_family("smollm3", SmolLM3)
register_family("phi3", Phi3)
register_family("granite", Granite)
register_family("minimax_m2", MiniMaxM2)
register_family("lfm2", Lfm2)
register_family("nemotron_h", NemotronH)
