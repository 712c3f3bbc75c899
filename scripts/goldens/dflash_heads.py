"""DFlash and DSpark heads in plain torch, checked against speculators where that computes the same.

Formulas: z-lab/dflash `dflash/model.py`, speculators `models/dflash` and `models/dspark`, DeepSpec
`modeling/dspark`, SpecForge `modeling/draft/dspark.py`, JetSpec `models/draft_head.py`. A block is a token
and masks at positions S …, after a context at positions 0 … S-1. S rows, M draft width, V draft vocabulary.
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
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
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
    "dflash-causal": {"format": "z-lab", "dflash_config": {"causal_head": True}},
    "dflash-anchor": {"format": "DeepSpec", "own_embedding": True, "anchor": True, "markov": {}},
    "dspark": {
        "format": "DeepSpec",
        "own_embedding": True,
        "anchor": True,
        "markov": {"markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True},
    },
    "dspark-rnn": {
        "format": "DeepSpec",
        "own_embedding": True,
        "anchor": True,
        "markov": {"markov_rank": 8, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    },
    "dspark-gated": {
        "format": "z-lab",
        "anchor": True,
        "markov": {"markov_rank": 8, "markov_head_type": "gated", "confidence_head_with_markov": True},
    },
    "dspark-speculators": {
        "format": "speculators",
        "layers": SLIDING,
        "head": {"draft_vocab_size": 64},
        "own_embedding": True,
        "anchor": True,
        "markov": {"markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True},
    },
    "dspark-speculators-masks": {
        "format": "speculators",
        "head": {"draft_vocab_size": 128, "sample_from_anchor": False},
        "markov": {"markov_rank": 8, "markov_head_type": "gated", "confidence_head_with_markov": True},
    },
}


def visible(case: str, sliding: bool, size: int) -> Tensor:
    """bool[size, S + size]: the positions that every row of a block of `size` rows sees."""
    query, key = ROWS + torch.arange(size)[:, None], torch.arange(ROWS + size)[None, :]
    chosen = CASES[case]
    if chosen.get("dflash_config", {}).get("causal_head"):
        return key <= query
    if not sliding:
        return torch.ones(size, ROWS + size, dtype=torch.bool)
    if chosen["format"] == "speculators":
        causal = not chosen["head"].get("sliding_window_non_causal", False)
        near = key >= ROWS - WINDOW
    else:
        causal = chosen.get("dflash_config", {}).get("causal", True)
        near = (query - key < WINDOW) & (key - query < WINDOW)
    return near & (key <= query) if causal else near


def block_rows(head: DraftHead, case: str, anchor: Tensor, features: Tensor, size: int) -> Tensor:
    """The rows [K, M] that give drafts, of a block of `size` rows after features [S, captures * M]."""
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
    return head.norm("norm", x if CASES[case].get("anchor") else x[1:])


def block_logits(
    head: DraftHead, rows: Tensor, anchor: Tensor, d2t: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Logits [K, V] of greedy drafts, each after the one before, and the confidence in each, [K] or None."""
    logits, previous = head.linear("lm_head", rows), anchor
    kind = next((part for part in ("gate", "joint") if f"markov_head.{part}_proj.weight" in head.weights), "")
    found, confidence, state = [], [], None
    for row, base in zip(rows, logits, strict=True):
        embedded = None
        if "markov_head.markov_w1.weight" in head.weights:
            embedded = head.weights["markov_head.markov_w1.weight"][previous]
            latent = embedded
            if kind == "gate":
                latent = (
                    torch.sigmoid(head.linear("markov_head.gate_proj", torch.cat([row, embedded]))) * latent
                )
            if kind == "joint":
                state = torch.zeros_like(embedded) if state is None else state
                parts = head.linear("markov_head.joint_proj", torch.cat([state, embedded, row])).chunk(3)
                gate = torch.sigmoid(parts[0])
                state = gate * state + (1 - gate) * torch.tanh(parts[1])
                latent = torch.tanh(parts[2])
            base = base + head.linear("markov_head.markov_w2", latent)
        if "confidence_head.proj.weight" in head.weights:
            wide = head.weights["confidence_head.proj.weight"].shape[1] > len(row)
            read = torch.cat([row, embedded]) if wide else row
            confidence.append(torch.sigmoid(head.linear("confidence_head.proj", read))[0])
        found.append(base)
        best = base.argmax()
        previous = best if d2t is None else best + d2t[best]
    return torch.stack(found), torch.stack(confidence) if confidence else None


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
    markov = chosen.get("markov", {})
    shape = {**markov, "sample_from_anchor": True} if markov else {}
    config = (DSparkSpeculatorConfig if markov else DFlashSpeculatorConfig)(
        transformer_layer_config=Qwen3Config(**layers, attn_implementation="eager"),
        aux_hidden_state_layer_ids=CAPTURES,
        block_size=BLOCK,
        mask_token_id=MASK_TOKEN,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark" if markov else "dflash",
            default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            verifier=VerifierConfig(name_or_path="llama-tied", architectures=["LlamaForCausalLM"]),
        ),
        **{"draft_vocab_size": target.config.vocab_size, **shape, **chosen.get("head", {})},
    )
    # The package would fetch the verifier's norm from the Hub, which only training uses.
    with mock.patch.object(core, "resolve_verifier_norm_class", return_value=Qwen3RMSNorm):
        model = (DSparkDraftModel if markov else DFlashDraftModel)(config)
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    if not chosen.get("own_embedding"):
        model.embed_tokens.weight.data = target.embedding.clone()
    if chosen["format"] == "DeepSpec":
        pass  # it saves a copy of the target's rows; ours are others, to tell them apart
    elif model.d2t is None:
        model.lm_head.weight.data = target.lm_head.clone()
    else:
        model.load_state_dict(vocabulary_map(len(model.t2d), len(model.d2t), generator), strict=False)
    return model.eval()


def published_logits(model: DFlashDraftModel, drafts: Tensor, anchor: Tensor, features: Tensor) -> Tensor:
    """Logits [BLOCK, V] of the package's own forward with its one anchor at position S, then `drafts` [K]."""
    length = ROWS + BLOCK
    tokens = torch.zeros(1, length, dtype=torch.long)
    tokens[0, ROWS] = anchor
    tokens[0, ROWS + 1 :] = drafts[: BLOCK - 1]
    padded = F.pad(features, (0, 0, 0, BLOCK))[None]
    anchors = (torch.tensor([ROWS]), torch.tensor([True]))
    with torch.no_grad(), mock.patch.object(core, "select_anchors", return_value=anchors):
        rows, logits, *_ = model._backbone_forward(
            padded,
            tokens,
            torch.ones(1, length),
            padded[..., : model.hidden_size],
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        if getattr(model, "markov_head", None) is not None:
            before = tokens[:, ROWS:]
            if not model.config.sample_from_anchor:
                before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
            logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=rows)
    return logits[0]


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
    flat = chosen["format"] == "DeepSpec"
    dropped = ("verifier_",) if flat else ("lm_head.", "embed_tokens.", "verifier_")
    markov = chosen.get("markov")
    block = {"mask_token_id": MASK_TOKEN, "target_layer_ids": [i - 1 for i in CAPTURES]}
    if markov is not None:
        block |= {"markov_rank": 0, "enable_confidence_head": bool(markov), **markov}
        block |= {"num_anchors": 512} if flat else {"attention_mode": "gqa", "confidence_head_alpha": 1.0}
        block |= {} if flat else {"projector_type": "dspark"}
    name = "Qwen3DSparkModel" if flat else "DFlashDraftModel" if markov is None else "DSparkDraftModel"
    config = {
        **{key: layers[key] for key in sorted(layers) if key not in ("dtype", "_attn_implementation")},
        "architectures": [name],
        "block_size": BLOCK,
        "num_target_layers": 4,
        **(block if flat else {"dflash_config": {**block, **chosen.get("dflash_config", {})}}),
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
        rows = block_rows(head, case, anchor, features, BLOCK)
        logits, confidence = block_logits(head, rows, anchor, model.d2t)
        drafts = greedy_drafts(logits, model.d2t)
        # z-lab and the package define windows differently, and the package's blocks are never causal.
        if chosen["format"] == "speculators" or not {"layers", "dflash_config"} & chosen.keys():
            published = published_logits(model, drafts["draft_tokens"][0], anchor, features)
            torch.testing.assert_close(published[BLOCK - len(logits) :], logits, rtol=1e-4, atol=2e-5)
        short, _ = block_logits(head, block_rows(head, case, anchor, features, SHORT), anchor, model.d2t)
        save(case, model, root / case / "checkpoint")
        results = {**drafts, "short_logits": short[None]}
        results |= {} if confidence is None else {"confidence": confidence[None]}
        write_outputs(root / case, target, features, results)
