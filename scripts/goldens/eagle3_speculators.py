"""EAGLE-3 heads in the speculators format, written and checked by the speculators package."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from goldens.draft_head import DraftHead, draft, eagle3_step, fuse
from goldens.head_cases import DRAFTS, LAYERS, ROWS, Target, vocabulary_map, write_outputs
from goldens.target_cases import CASES as TARGETS
from goldens.targets import random_weight

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}

# How cases differ: `head` in the speculators config, `layers` in its transformer_layer_config.
CASES: dict[str, dict] = {
    "eagle3-residual-normed": {"head": {"norm_before_residual": True}},
    "eagle3-residual-raw": {"head": {"norm_before_residual": False, "draft_vocab_size": 128}},
    "eagle3-norm-before-fc": {"head": {"norm_before_residual": True, "norm_before_fc": True}},
    "eagle3-fc-norm": {"head": {"fc_norm": True}, "captures": [0, 2, 4]},
    "eagle3-norm-output": {"head": {"norm_before_residual": True, "norm_output": True}},
    "eagle3-two-layers-qwen3": {
        "layers": {"model_type": "qwen3", "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 12},
        "head": {"norm_before_residual": True},
    },
    "eagle3-sliding-window": {
        "layers": {"num_hidden_layers": 2, **SLIDING},
        "head": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    },
    "eagle3-llama3-rope-biased": {
        "target": "llama-untied-llama3-rope",
        "layers": {
            "hidden_size": 48,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": TARGETS["llama-untied-llama3-rope"].config["rope_parameters"],
        },
        "head": {"norm_before_residual": True, "draft_vocab_size": 80},
        "captures": [1, 3, 5],
    },
}


def build(
    kind: str, chosen: dict, target: Target, seed: int, drafts: int = DRAFTS, **more: Any
) -> Eagle3DraftModel | PEagleDraftModel:
    """The published model with random weights, also of its embedding, which is never the target's.

    Args:
      kind: "eagle3" or "peagle".
      chosen: how the case differs.
      **more: of the speculators config.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = {**LAYERS, "vocab_size": target.config.vocab_size, **chosen.get("layers", {})}
    layer_class = Qwen3Config if layers.pop("model_type", "llama") == "qwen3" else LlamaConfig
    name = chosen.get("target", "llama-tied")
    model_class, config_class = {
        "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
        "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
    }[kind]
    model = model_class(
        config_class(
            transformer_layer_config=layer_class(**layers, attn_implementation="eager"),
            eagle_aux_hidden_state_layer_ids=chosen.get("captures", [1, 2, 3]),
            speculators_config=SpeculatorsConfig(
                algorithm=kind,
                default_proposal_method="greedy",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
                verifier=VerifierConfig(name_or_path=name, architectures=["LlamaForCausalLM"]),
            ),
            **{"draft_vocab_size": 64, **chosen["head"], **more},
        )
    )
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    if model.d2t is not None:
        model.load_state_dict(vocabulary_map(len(model.t2d), len(model.d2t), generator), strict=False)
    return model.eval()


def save(model: Eagle3DraftModel | PEagleDraftModel, folder: Path) -> None:
    """Writes `folder/checkpoint`."""
    model.save_pretrained(folder / "checkpoint")
    (folder / "checkpoint" / "config.py").unlink()  # the package saves its source beside the config


def published_logits(model: Eagle3DraftModel, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Logits [S,V] of the package's own forward pass, for every step of its training-time test.

    At step k, row i reads token i+k. With the drafts appended to the tokens, the last row computes what
    drafting computes.
    """
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    with torch.no_grad():
        documents = torch.zeros(1, len(tokens), dtype=torch.long)
        model(features[None], tokens[None], documents, ttt_steps=steps)
    hook.remove()
    return logits


def check(model: Eagle3DraftModel, target: Target, features: Tensor, results: dict[str, Tensor]) -> None:
    """Raise if the package's forward pass gives other logits than `results`."""
    tokens = torch.cat([target.tokens, results["draft_tokens"][0, :-1]])
    padded = torch.cat([features, features.new_zeros(DRAFTS - 1, features.shape[1])])
    # In later steps the window stays at row i, so with a sliding window only step 0 is comparable.
    steps = 1 if model.uses_sliding_window_attn else DRAFTS
    published = published_logits(model, tokens, padded, steps)
    torch.testing.assert_close(published[0][:ROWS], results["logits"][0], rtol=1e-4, atol=2e-5)
    drafted = torch.stack([logits[ROWS - 1] for logits in published])
    torch.testing.assert_close(drafted, results["draft_logits"][0, :steps], rtol=1e-4, atol=2e-5)


def checked(model: Eagle3DraftModel, target: Target) -> tuple[Tensor, dict[str, Tensor]]:
    """The features that a published head reads, and its outputs for them, after `check`."""
    config = model.config
    head = DraftHead(
        config.transformer_layer_config,
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
    )
    features = target.features(config.eagle_aux_hidden_state_layer_ids)
    results = draft(partial(eagle3_step, head), target.tokens, fuse(head, features), model.d2t, DRAFTS)
    check(model, target, features, results)
    return features, results


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, chosen) in enumerate(CASES.items(), start=101):
        target = Target(chosen.get("target", "llama-tied"))
        model = build("eagle3", chosen, target, seed)
        features, results = checked(model, target)
        save(model, root / case)
        write_outputs(root / case, target, features, results)
