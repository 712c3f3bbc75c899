"""The MTP layer of a DeepSeek-V4 golden: transformers' decoder layer between what vLLM puts around it.

Formula: vLLM 0.33 `models/deepseek_v4/nvidia/mtp.py`. Row i pairs token i+1, whose embedding is zero at
position 0, with all of the target's residual streams after its last layer at position i:
x = h_proj(hnorm(streams)) + e_proj(enorm(token)) in every stream. The layer sees a window alone, its experts
are routed, and it recycles its own streams. Every step recomputes all rows.
"""

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from goldens.deepseek_v4_targets import WINDOW
from goldens.draft_head import draft
from goldens.head_cases import DRAFTS, GOLDENS, ROWS, Target, split_experts, write_head, write_outputs
from goldens.targets import random_weight

TARGETS = {"deepseek-v4-mtp": "deepseek-v4", "deepseek-v4-odd-ratios-mtp": "deepseek-v4-odd-ratios"}
PUBLISHED = {
    "layer.self_attn.q_a_proj": "attn.wq_a",
    "layer.self_attn.q_a_norm": "attn.q_norm",
    "layer.self_attn.q_b_proj": "attn.wq_b",
    "layer.self_attn.kv_proj": "attn.wkv",
    "layer.self_attn.kv_norm": "attn.kv_norm",
    "layer.self_attn.o_a_proj": "attn.wo_a",
    "layer.self_attn.o_b_proj": "attn.wo_b",
    "layer.self_attn.sinks": "attn.attn_sink",
    "layer.mlp.gate.weight": "ffn.gate.weight",
    "layer.mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "layer.mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "layer.mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
    "layer.mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    "layer.input_layernorm": "attn_norm",
    "layer.post_attention_layernorm": "ffn_norm",
    "layer.attn_hc.": "hc_attn_",
    "layer.ffn_hc.": "hc_ffn_",
    "hc_head.hc_": "hc_head_",
}
"""The published names of the layer's tensors, by transformers' names of modules."""


class GoldenTarget(Target):
    """A target, run by transformers on the text of its golden."""

    def __init__(self, case: str) -> None:
        folder = GOLDENS / case
        self.config = json.loads((folder / "checkpoint" / "config.json").read_text())
        model = DeepseekV4ForCausalLM.from_pretrained(
            folder / "checkpoint", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        ids = load_file(folder / "outputs.safetensors")["input_ids"].long()
        streams: list[Tensor] = []
        hook = model.model.hc_head.register_forward_pre_hook(lambda _, args: streams.append(args[0].clone()))
        with torch.no_grad():
            model(ids, use_cache=False)
        hook.remove()
        self.embedding = model.model.embed_tokens.weight.detach()
        self.lm_head = model.lm_head.weight.detach()
        self.tokens = ids[0, 1 : ROWS + 1]
        self.streams = streams[0][0, :ROWS].flatten(1)


class Layer(nn.Module):
    """The layer with random weights, and its steps."""

    def __init__(self, target: GoldenTarget, case: str, seed: int) -> None:
        super().__init__()
        self.target = target
        config = deepcopy(AutoConfig.from_pretrained(GOLDENS / TARGETS[case] / "checkpoint"))
        config._attn_implementation = "eager"
        config.layer_types = [*config.layer_types, WINDOW]
        config.mlp_layer_types = [*config.mlp_layer_types, "moe"]
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm, self.hnorm, self.norm = (v4.DeepseekV4RMSNorm(width, eps) for _ in range(3))
        self.e_proj, self.h_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.layer = v4.DeepseekV4DecoderLayer(config, config.num_hidden_layers)
        self.hc_head = v4.DeepseekV4HyperHead(config)
        self.rope = v4.DeepseekV4RotaryEmbedding(config)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.state_dict().items():
            weight = random_weight(name, tensor.shape, generator)
            tensor.copy_(3 * weight if "_proj" in name or "experts" in name else weight)

    @torch.no_grad()
    def step(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S,V] and recycled streams [S,streams*M], from tokens [S] and streams of the same shape."""
        embedded = self.target.embedding[tokens].clone()
        embedded[0] = 0
        streams = rows.unflatten(1, (self.config.hc_mult, -1))
        x = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedded))[:, None]
        positions = torch.arange(len(tokens))
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= self.config.sliding_window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
        ropes = {kind: self.rope(x[None], positions[None], layer_type=kind) for kind in ("main", "compress")}
        out = self.layer(
            x[None],
            input_ids=tokens[None],
            position_embeddings=ropes,
            position_ids=positions[None],
            attention_mask=mask,
        )
        normed = self.norm(self.hc_head(out))[0]
        return normed @ self.target.lm_head.T, out[0].flatten(1)

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their published names."""
        named: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            if name.startswith("layer.mlp.experts."):
                parts = ("w1", "w3") if "gate_up" in name else ("w2",)
                named |= split_experts("ffn.experts", tensor, parts)
                continue
            for module, published in PUBLISHED.items():
                if name.startswith(module):
                    name = name.replace(module, published, 1)
                    break
            named[name] = tensor
        return {f"mtp.0.{name}": tensor for name, tensor in named.items()}


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint`, with this layer only, and `root/<case>/outputs.safetensors`."""
    for seed, (case, name) in enumerate(TARGETS.items(), start=651):
        target = GoldenTarget(name)
        layer = Layer(target, case, seed)
        results = draft(layer.step, target.tokens, target.streams, None, DRAFTS)
        write_head(root / case, target.config, layer.tensors())
        write_outputs(root / case, target, target.streams, results)
