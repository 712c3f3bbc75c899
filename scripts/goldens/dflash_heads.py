"""DFlash heads in plain torch, checked against the speculators package where both compute the same.

Formulas: z-lab/dflash `dflash/model.py`, speculators `models/dflash`. A block is a token and K masks at
positions S … S+K, after a context at positions 0 … S-1. S rows, M draft width, V draft vocabulary.
"""

import json
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import core
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from goldens.draft_head import DraftHead, feed_forward
from goldens.head_cases import LAYERS, ROWS, Target, greedy_drafts, vocabulary_map, write_outputs
from goldens.targets import random_weight

BLOCK, SHORT, MASK_TOKEN, CAPTURES = 8, 4, 11, [1, 2, 4]
WINDOW = 5

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "use_sliding_window": True,
}
CASES: dict[str, dict] = {
    "dflash": {"format": "z-lab"},
    "dflash-sliding": {"format": "z-lab", "layers": SLIDING, "own_embedding": True},
    "dflash-sliding-non-causal": {"format": "z-lab", "layers": SLIDING, "dflash_config": {"causal": False}},
    "dflash-speculators": {
        "format": "speculators",
        "layers": SLIDING,
        "head": {"draft_vocab_size": 64},
        "own_embedding": True,
    },
    "dflash-speculators-non-causal": {
        "format": "speculators",
        "layers": SLIDING,
        "head": {"draft_vocab_size": 128, "sliding_window_non_causal": True},
    },
}


def visible(case: str, sliding: bool, size: int) -> Tensor:
    """bool[size, S + size]: the positions that every row of a block of `size` rows sees."""
    query, key = ROWS + torch.arange(size)[:, None], torch.arange(ROWS + size)[None, :]
    if not sliding:
        return torch.ones(size, ROWS + size, dtype=torch.bool)
    chosen = CASES[case]
    if chosen["format"] == "speculators":
        causal = not chosen["head"].get("sliding_window_non_causal", False)
        near = key >= ROWS - WINDOW
    else:
        causal = chosen.get("dflash_config", {}).get("causal", True)
        near = (query - key < WINDOW) & (key - query < WINDOW)
    return near & (key <= query) if causal else near


def block_logits(head: DraftHead, case: str, anchor: Tensor, features: Tensor, size: int) -> Tensor:
    """Logits [size-1, V] of a block of `size` rows after features [S, captures * M]."""
    config = head.config
    context = head.norm("hidden_norm", head.linear("fc", features))
    x = head.embed(torch.cat([anchor[None], torch.full((size - 1,), MASK_TOKEN)]))
    positions, heads = torch.arange(ROWS + size), (-1, config.head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}.self_attn"
        rows = head.norm(f"layers.{layer}.input_layernorm", x)
        both = torch.cat([context, rows])
        q = head.norm(f"{name}.q_norm", head.linear(f"{name}.q_proj", rows).unflatten(-1, heads))
        k = head.norm(f"{name}.k_norm", head.linear(f"{name}.k_proj", both).unflatten(-1, heads))
        v = head.linear(f"{name}.v_proj", both).unflatten(-1, heads)
        q, _ = apply_rotary_pos_emb(q[None], q[None], cos[:, ROWS:], sin[:, ROWS:], unsqueeze_dim=2)
        k, _ = apply_rotary_pos_emb(k[None], k[None], cos, sin, unsqueeze_dim=2)
        groups = q.shape[2] // k.shape[2]
        k, v = k[0].repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[0], k) * config.head_dim**-0.5
        seen = visible(case, head.window(layer) is not None, size)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + head.linear(f"{name}.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        x = feed_forward(head, layer, x)
    return head.linear("lm_head", head.norm("norm", x[1:]))


def build(case: str, target: Target) -> DFlashDraftModel:
    """The speculators model with random weights; a full output head is the target's, and so is the embedding
    unless the case has its own."""
    chosen = CASES[case]
    generator = torch.Generator().manual_seed(411 + list(CASES).index(case))
    layers = {
        **LAYERS,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "vocab_size": target.config.vocab_size,
        **chosen.get("layers", {}),
    }
    config = DFlashSpeculatorConfig(
        transformer_layer_config=Qwen3Config(**layers, attn_implementation="eager"),
        aux_hidden_state_layer_ids=CAPTURES,
        block_size=BLOCK,
        mask_token_id=MASK_TOKEN,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            verifier=VerifierConfig(name_or_path="llama-tied", architectures=["LlamaForCausalLM"]),
        ),
        **{"draft_vocab_size": target.config.vocab_size, **chosen.get("head", {})},
    )
    # The package would fetch the verifier's norm from the Hub, which only training uses.
    with mock.patch.object(core, "resolve_verifier_norm_class", return_value=Qwen3RMSNorm):
        model = DFlashDraftModel(config)
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    if not chosen.get("own_embedding"):
        model.embed_tokens.weight.data = target.embedding.clone()
    if model.d2t is None:
        model.lm_head.weight.data = target.lm_head.clone()
    else:
        model.load_state_dict(vocabulary_map(len(model.t2d), len(model.d2t), generator), strict=False)
    return model.eval()


def published_logits(model: DFlashDraftModel, anchor: Tensor, features: Tensor) -> Tensor:
    """Logits [BLOCK-1, V] of the package's own forward with its one anchor at position S."""
    length = ROWS + BLOCK
    tokens = torch.zeros(1, length, dtype=torch.long)
    tokens[0, ROWS] = anchor
    padded = F.pad(features, (0, 0, 0, BLOCK))[None]
    anchors = (torch.tensor([ROWS]), torch.tensor([True]))
    with torch.no_grad(), mock.patch.object(core, "select_anchors", return_value=anchors):
        _, logits, *_ = model._backbone_forward(
            padded,
            tokens,
            torch.ones(1, length),
            padded[..., : model.hidden_size],
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
    return logits[0, 1:]


def save(case: str, model: DFlashDraftModel, folder: Path) -> None:
    """Writes the checkpoint in the case's format."""
    chosen = CASES[case]
    own = ("embed_tokens.weight",) if chosen.get("own_embedding") else ()
    if chosen["format"] == "speculators":
        model.save_pretrained(folder)
        (folder / "config.py").unlink()  # the package saves its source beside the config
        file = folder / "model.safetensors"
        tensors = load_file(file)
        # The package leaves the embedding out.
        save_file({**tensors, **{name: model.state_dict()[name] for name in own}}, file, {"format": "pt"})
        return
    folder.mkdir(parents=True)
    layers = model.config.transformer_layer_config.to_dict()
    dropped = ("lm_head.", "embed_tokens.", "verifier_")
    config = {
        **{key: layers[key] for key in sorted(layers) if key not in ("dtype", "_attn_implementation")},
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": 4,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN,
            "target_layer_ids": [i - 1 for i in CAPTURES],
            **chosen.get("dflash_config", {}),
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    state = model.state_dict().items()
    tensors = {n: t.contiguous() for n, t in state if n in own or not n.startswith(dropped)}
    save_file(tensors, folder / "model.safetensors")


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    target = Target("llama-tied")
    anchor, features = target.tokens[-1], target.features(CAPTURES)
    for case, chosen in CASES.items():
        model = build(case, target)
        config = model.config.transformer_layer_config
        head = DraftHead(config, {name: tensor.detach() for name, tensor in model.state_dict().items()})
        logits = block_logits(head, case, anchor, features, BLOCK)
        # z-lab and the package define windows differently.
        if chosen["format"] == "speculators" or "layers" not in chosen:
            published = published_logits(model, anchor, features)
            torch.testing.assert_close(published, logits, rtol=1e-4, atol=2e-5)
        short = block_logits(head, case, anchor, features, SHORT)
        save(case, model, root / case / "checkpoint")
        results = {**greedy_drafts(logits, model.d2t), "short_logits": short[None]}
        write_outputs(root / case, target, features, results)
