"""P-EAGLE heads in the speculators format, written and checked by the speculators package."""

from pathlib import Path
from unittest import mock

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from goldens.draft_head import DraftHead, eagle3_step, fuse
from goldens.head_cases import LAYERS, ROWS, Target, greedy_drafts, vocabulary_map, write_outputs
from goldens.llama_targets import random_weight

DRAFTS, MASK_TOKEN = 7, 11

# How cases differ: `head` in the speculators config, `layers` in its transformer_layer_config.
CASES: dict[str, dict] = {
    "peagle": {"layers": {"num_hidden_layers": 2}, "head": {"norm_before_residual": False}},
    "peagle-qwen3-sliding": {
        "layers": {
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 9,  # more than K: past a window, the package lets a chain see itself
            "use_sliding_window": True,
        },
        "head": {"norm_before_residual": True, "norm_before_fc": True, "draft_vocab_size": 128},
    },
}


def build(case: str, target: Target) -> PEagleDraftModel:
    """The published model with random weights and, as after training, its own embedding."""
    chosen = CASES[case]
    generator = torch.Generator().manual_seed(301 + list(CASES).index(case))
    layers = {**LAYERS, "vocab_size": target.config.vocab_size, **chosen["layers"]}
    layer_class = Qwen3Config if layers.pop("model_type", "llama") == "qwen3" else LlamaConfig
    model = PEagleDraftModel(
        PEagleSpeculatorConfig(
            transformer_layer_config=layer_class(**layers, attn_implementation="eager"),
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            mask_token_id=MASK_TOKEN,
            speculators_config=SpeculatorsConfig(
                algorithm="peagle",
                default_proposal_method="greedy",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTS)],
                verifier=VerifierConfig(name_or_path="llama-tied", architectures=["LlamaForCausalLM"]),
            ),
            **{"draft_vocab_size": 64, **chosen["head"]},
        )
    )
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    if model.d2t is not None:
        model.load_state_dict(vocabulary_map(len(model.t2d), len(model.d2t), generator), strict=False)
    return model.eval()


def published_logits(model: PEagleDraftModel, tokens: Tensor, features: Tensor) -> Tensor:
    """Logits [K,V] of the package's own forward pass, with one chain at the end instead of sampled chains."""
    anchors = torch.cat([torch.arange(ROWS), torch.full((DRAFTS - 1,), ROWS - 1)])
    depths = torch.cat([torch.zeros(ROWS, dtype=torch.long), torch.arange(1, DRAFTS)])
    # Values past the rows are masked by depth; the package only needs to be able to index them.
    tokens = torch.nn.functional.pad(tokens, (0, DRAFTS - 1))[None]
    features = torch.nn.functional.pad(features, (0, 0, 0, DRAFTS - 1))[None]
    logits: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    with (
        torch.no_grad(),
        mock.patch.object(core, "generate_cod_sample_indices", return_value=(anchors, depths)),
        mock.patch.object(core, "compute_metrics", return_value=(None, {})),
    ):
        model(
            features,
            tokens,
            torch.zeros_like(tokens),
            verifier_last_hidden_states=features[..., : model.hidden_size],
        )
    hook.remove()
    return logits[0][ROWS - 1 :]


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    target = Target("llama-tied")
    for case in CASES:
        model = build(case, target)
        config = model.config
        head = DraftHead(
            config.transformer_layer_config,
            {name: tensor.detach() for name, tensor in model.state_dict().items()},
            norm_before_residual=config.norm_before_residual,
        )
        features = target.features(config.eagle_aux_hidden_state_layer_ids)
        masks = model.mask_hidden.detach()[0].expand(DRAFTS - 1, -1)
        tokens = torch.cat([target.tokens, torch.full((DRAFTS - 1,), MASK_TOKEN)])
        logits = eagle3_step(head, tokens, fuse(head, torch.cat([features, masks])))[0][ROWS - 1 :]
        published = published_logits(model, target.tokens, features)
        torch.testing.assert_close(published, logits, rtol=1e-4, atol=2e-5)
        model.save_pretrained(root / case / "checkpoint")
        (root / case / "checkpoint" / "config.py").unlink()  # the package saves its source beside the config
        write_outputs(root / case, target, features, greedy_drafts(logits, model.d2t))
