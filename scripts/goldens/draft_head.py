"""EAGLE heads in plain torch, one sequence at a time; every step recomputes the whole sequence.

Formulas: SafeAILab/EAGLE `eagle/model/cnets1.py` (EAGLE-1) and `cnets.py` (EAGLE-3), vLLM
`model_executor/models/llama_eagle.py` and `llama_eagle3.py`. Row i pairs token i+1 with the target's feature
of token i, at position i. S rows, M draft width, V draft vocabulary, K drafts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

# (tokens [S], rows [S,M]) -> (logits [S,V], recycled hidden [S,M])
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DraftHead:
    """Weights by their `layers.0.*` names, the transformers config of the layers, and two flags."""

    config: PretrainedConfig
    weights: dict[str, Tensor]
    norm_before_residual: bool = False
    norm_output: bool = False

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return self.weights[f"{name}.weight"] * (x * scale)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights["embed_tokens.weight"][tokens]

    def window(self, layer: int) -> int | None:
        """The number of keys that a query sees, including its own; None for all before it."""
        types = getattr(self.config, "layer_types", None)
        return self.config.sliding_window if types and types[layer] == "sliding_attention" else None


def attention(head: DraftHead, layer: int, x: Tensor) -> Tensor:
    """Causal attention of `layer` over x [S, 2M or M] at positions 0 … S-1; returns [S,M]."""
    name, size = f"layers.{layer}.self_attn", head.config.head_dim
    q, k, v = (head.linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, size)) for part in "qkv")
    if f"{name}.q_norm.weight" in head.weights:
        q, k = head.norm(f"{name}.q_norm", q), head.norm(f"{name}.k_norm", k)
    positions = torch.arange(len(x))
    cos, sin = LlamaRotaryEmbedding(head.config)(x, positions[None])
    q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    groups = q.shape[2] // k.shape[2]
    k, v = k[0].repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    distance = positions[:, None] - positions[None, :]
    visible = (distance >= 0) & (distance < (head.window(layer) or len(x)))
    scores = torch.einsum("qhd,khd->hqk", q[0], k) * size**-0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return head.linear(f"{name}.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


def feed_forward(head: DraftHead, layer: int, x: Tensor) -> Tensor:
    """x [S,M] plus the SwiGLU of its norm."""
    name = f"layers.{layer}.mlp"
    y = head.norm(f"layers.{layer}.post_attention_layernorm", x)
    gate, up = head.linear(f"{name}.gate_proj", y), head.linear(f"{name}.up_proj", y)
    return x + head.linear(f"{name}.down_proj", F.silu(gate) * up)


def fuse(head: DraftHead, features: Tensor) -> Tensor:
    """EAGLE-3: target features [S, captures * target width] to rows [S,M]."""
    if "input_norm.weight" in head.weights:
        features = head.norm("input_norm", features)
    if count := sum(name.startswith("fc_norm.") for name in head.weights):
        chunks = features.chunk(count, dim=-1)
        features = torch.cat([head.norm(f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)], dim=-1)
    return head.linear("fc", features)


def eagle3_step(head: DraftHead, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One forward pass over tokens [S] and fused or recycled rows [S,M]: logits [S,V], recycled [S,M]."""
    normed = head.norm("layers.0.hidden_norm", rows)
    x = torch.cat([head.norm("layers.0.input_layernorm", head.embed(tokens)), normed], dim=-1)
    x = (normed if head.norm_before_residual else rows) + attention(head, 0, x)
    x = feed_forward(head, 0, x)
    for layer in range(1, head.config.num_hidden_layers):
        x = x + attention(head, layer, head.norm(f"layers.{layer}.input_layernorm", x))
        x = feed_forward(head, layer, x)
    normed = head.norm("norm", x)
    return head.linear("lm_head", normed), normed if head.norm_output else x


def eagle1_step(head: DraftHead, lm_head: Tensor, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One forward pass over tokens [S] and rows [S,M], the target's final hidden states or recycled ones.

    `lm_head` [V,M] is the target's. Layer 0 has no input norm, and the output is not normed.
    """
    x = head.linear("fc", torch.cat([head.embed(tokens), rows], dim=-1))
    for layer in range(head.config.num_hidden_layers):
        normed = head.norm(f"layers.{layer}.input_layernorm", x) if layer else x
        x = feed_forward(head, layer, x + attention(head, layer, normed))
    return F.linear(x, lm_head), x


def draft(step: Step, tokens: Tensor, rows: Tensor, d2t: Tensor | None, count: int) -> dict[str, Tensor]:
    """One pass over all rows, then `count` greedy drafts from the last row, each fed back with its hidden.

    Returns logits [1,S,V], hidden [1,S,M] and, per draft, draft_tokens [1,K] in target ids, draft_logits
    [1,K,V], draft_hidden [1,K,M]; draft 0 comes from the last of the S rows.
    """
    context = logits, hidden = step(tokens, rows)
    drafts: list[tuple[Tensor, Tensor, Tensor]] = []
    while True:
        best = logits[-1].topk(2)
        if best.values[0] - best.values[1] < 1e-3:
            raise ValueError(f"draft {len(drafts)}: the two best logits nearly tie; change the seed")
        chosen = best.indices[:1]
        token = chosen if d2t is None else chosen + d2t[chosen]
        drafts.append((token[0], logits[-1], hidden[-1]))
        if len(drafts) == count:
            break
        tokens, rows = torch.cat([tokens, token]), torch.cat([rows, hidden[-1:]])
        logits, hidden = step(tokens, rows)
    names = ("draft_tokens", "draft_logits", "draft_hidden")
    results = {
        name: torch.stack(values)[None] for name, values in zip(names, zip(*drafts, strict=True), strict=True)
    }
    return {"logits": context[0][None], "hidden": context[1][None], **results}
