"""MTP layers of targets' goldens: of DeepSeek-V3 and GLM-4.7-Flash with the layer that transformers drafts
with, of Qwen3-Next and Qwen3.5 with a full-attention layer of their class, of Nemotron-H with several
layers of its class.

Formula: vLLM 0.26 `deepseek_mtp.py` and `glm4_moe_lite_mtp.py`. Row i pairs token i+1, whose embedding is
zero at position 0, with the target's final hidden state i, at position i. DeepSeek-V3 recycles its output
after `shared_head.norm`, GLM-4.7-Flash before it. Every step recomputes all rows. In vLLM 0.33's
`qwen3_next_mtp.py` and `qwen3_5_mtp.py` tensors have other names, and position 0 has its token's embedding;
the normed output is recycled. So it is in `nemotron_h_mtp.py`, whose first layer has the norms and the
projection in front of it, and whose last one has the norm behind it.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from goldens.draft_head import draft
from goldens.head_cases import DRAFTS, GOLDENS, ROWS, Target, split_experts, write_head, write_outputs
from goldens.targets import random_weight

CASES: dict[str, dict] = {
    "deepseek-v3-mtp": {"target": "deepseek-v3", "recycles_normed": True},
    "glm4-moe-lite-mtp": {"target": "glm4-moe-lite", "recycles_normed": False},
}
QWEN_CASES = {
    "qwen3-next-mtp": ("qwen3-next", modeling_qwen3_next, "Qwen3Next", "Qwen3NextRotaryEmbedding"),
    "qwen3-5-mtp": ("qwen3-5", modeling_qwen3_5, "Qwen3_5", "Qwen3_5TextRotaryEmbedding"),
}
NEMOTRON_CASES = {
    "nemotron-h-mtp": ("nemotron-h", ["full_attention", "moe"]),
    "nemotron-h-latent-mtp": ("nemotron-h-latent", ["moe", "full_attention", "full_attention"]),
}
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
EMBEDDINGS = ("model.embed_tokens.weight", "backbone.embeddings.weight")


class GoldenTarget(Target):
    """A target, read from its golden."""

    def __init__(self, case: str) -> None:
        folder = GOLDENS / case
        weights = load_file(folder / "checkpoint" / "model.safetensors")
        outputs = load_file(folder / "outputs.safetensors")
        self.config = json.loads((folder / "checkpoint" / "config.json").read_text())
        self.embedding = next(weights[name] for name in EMBEDDINGS if name in weights)
        self.lm_head = weights["lm_head.weight"]
        self.tokens = outputs["input_ids"][0, 1 : ROWS + 1]
        self.normed = outputs["normed"][0, :ROWS]


class Layer:
    """The layer with random weights, and its steps."""

    def __init__(self, case: str, target: GoldenTarget, seed: int) -> None:
        self.target, self.recycles_normed = target, CASES[case]["recycles_normed"]
        config = deepcopy(AutoConfig.from_pretrained(GOLDENS / CASES[case]["target"] / "checkpoint"))
        config._attn_implementation = "eager"
        if config.model_type == "deepseek_v3":
            module, prefix = modeling_deepseek_v3, "DeepseekV3"
        else:
            module, prefix = modeling_glm4_moe_lite, "Glm4MoeLite"
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        block, norm = getattr(module, f"{prefix}DecoderLayer"), getattr(module, f"{prefix}RMSNorm")
        self.index = config.num_hidden_layers
        self.layer = MtpLayer(config, block, norm, self.index, use_post_norm=True).eval()
        self.rope = getattr(module, f"{prefix}RotaryEmbedding")(config)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.layer.state_dict().items():
            tensor.copy_(random_weight(name, tensor.shape, generator))

    @torch.no_grad()
    def step(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S,V] and recycled hidden states [S,M], from tokens [S] and hidden states [S,M]."""
        embedded = self.target.embedding[tokens].clone()
        embedded[0] = 0
        count = len(tokens)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        raw: list[Tensor] = []
        hook = self.layer.post_norm.register_forward_pre_hook(lambda _, args: raw.append(args[0][0].clone()))
        normed = self.layer(
            embedded[None],
            rows[None],
            position_embeddings=self.rope(embedded[None], positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )[0]
        hook.remove()
        return normed @ self.target.lm_head.T, normed if self.recycles_normed else raw[0]

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their published names."""
        named: dict[str, Tensor] = {}
        for name, tensor in self.layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            if name.startswith("mlp.experts."):
                named |= split_experts("mlp.experts", tensor, PARTS[name.rsplit(".", 1)[-1]])
            else:
                named[name] = tensor
        return {f"model.layers.{self.index}.{name}": tensor for name, tensor in named.items()}


class QwenLayer:
    """A layer of the target's class between two norms and a projection, and the norm behind it."""

    def __init__(self, case: str, target: GoldenTarget, seed: int) -> None:
        self.target = target
        name, module, prefix, rope = QWEN_CASES[case]
        config = deepcopy(AutoConfig.from_pretrained(GOLDENS / name / "checkpoint"))
        config._attn_implementation = "eager"
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        norm, width = getattr(module, f"{prefix}RMSNorm"), config.hidden_size
        self.parts = torch.nn.ModuleDict(
            {
                "pre_fc_norm_embedding": norm(width, config.rms_norm_eps),
                "pre_fc_norm_hidden": norm(width, config.rms_norm_eps),
                "fc": torch.nn.Linear(2 * width, width, bias=False),
                "layers": torch.nn.ModuleList([getattr(module, f"{prefix}DecoderLayer")(config, 0)]),
                "norm": norm(width, config.rms_norm_eps),
            }
        ).eval()
        self.rope = getattr(module, rope)(config)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.parts.state_dict().items():
            offset = 1 if "norm" in name else 0  # these norms are offsets from 1
            tensor.copy_(random_weight(name, tensor.shape, generator) - offset)

    @torch.no_grad()
    def step(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Layer`."""
        embedded, count = self.target.embedding[tokens], len(tokens)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        positions = torch.arange(count)[None]
        both = [self.parts["pre_fc_norm_embedding"](embedded), self.parts["pre_fc_norm_hidden"](rows)]
        x = self.parts["fc"](torch.cat(both, dim=-1))[None]
        x = self.parts["layers"][0](
            x, position_embeddings=self.rope(x, positions), attention_mask=mask, position_ids=positions
        )
        normed = self.parts["norm"](x)[0]
        return normed @ self.target.lm_head.T, normed

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their published names."""
        named = {}
        for name, tensor in self.parts.state_dict().items():
            if ".experts." not in name:
                named[f"mtp.{name}"] = tensor
                continue
            stem, leaf = name.rsplit(".", 1)
            named |= split_experts(f"mtp.{stem}", tensor, PARTS[leaf])
        return named


class NemotronLayers:
    """Layers of the target's class between two norms and a projection, and the norm behind them."""

    def __init__(self, case: str, target: GoldenTarget, seed: int) -> None:
        self.target = target
        name, kinds = NEMOTRON_CASES[case]
        target.config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": kinds}
        config = deepcopy(AutoConfig.from_pretrained(GOLDENS / name / "checkpoint"))
        config._attn_implementation, config.layers_block_type = "eager", kinds
        width, eps, last = config.hidden_size, config.layer_norm_epsilon, len(kinds) - 1
        self.layers = torch.nn.ModuleList(
            [modeling_nemotron_h.NemotronHBlock(config, i) for i in range(len(kinds))]
        )
        self.first, self.last = self.layers[0], self.layers[last]
        self.first.enorm, self.first.hnorm, self.last.final_layernorm = (
            modeling_nemotron_h.NemotronHRMSNorm(width, eps) for _ in range(3)
        )
        self.first.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.layers.eval()
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.layers.state_dict().items():
            tensor.copy_(random_weight(name, tensor.shape, generator))

    @torch.no_grad()
    def step(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Layer`."""
        count = len(tokens)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        both = [self.first.enorm(self.target.embedding[tokens]), self.first.hnorm(rows)]
        x = self.first.eh_proj(torch.cat(both, dim=-1))[None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask)
        normed = self.last.final_layernorm(x)[0]
        return normed @ self.target.lm_head.T, normed

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their published names."""
        named: dict[str, Tensor] = {}
        for name, tensor in self.layers.state_dict().items():
            stem, leaf = name.rsplit(".", 1)
            if stem.endswith(".experts"):
                named |= split_experts(f"mtp.layers.{stem}", tensor, (leaf,))
            else:
                named[f"mtp.layers.{name}"] = tensor
        return named


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint`, with this layer only, and `root/<case>/outputs.safetensors`."""
    kinds: dict[str, Any] = dict.fromkeys(CASES, Layer) | dict.fromkeys(QWEN_CASES, QwenLayer)
    targets = {case: chosen["target"] for case, chosen in CASES.items()}
    kinds |= dict.fromkeys(NEMOTRON_CASES, NemotronLayers)
    targets |= {case: name for case, (name, *_) in (QWEN_CASES | NEMOTRON_CASES).items()}
    for seed, (case, kind) in enumerate(kinds.items(), start=551):
        target = GoldenTarget(targets[case])
        layer = kind(case, target, seed)
        results = draft(layer.step, target.tokens, target.normed, None, DRAFTS)
        write_head(root / case, target.config, layer.tensors())
        write_outputs(root / case, target, target.normed, results)
