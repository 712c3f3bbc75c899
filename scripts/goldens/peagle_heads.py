"""P-EAGLE heads in the speculators format, written and checked by the speculators package."""

from pathlib import Path
from unittest import mock

import torch
from speculators.models.peagle import core
from speculators.models.peagle.core import PEagleDraftModel
from torch import Tensor

from goldens.draft_head import DraftHead, eagle3_step, fuse
from goldens.eagle3_speculators import build, save
from goldens.head_cases import ROWS, Target, greedy_drafts, write_outputs

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
    for seed, (case, chosen) in enumerate(CASES.items(), start=301):
        model = build("peagle", chosen, target, seed, DRAFTS, mask_token_id=MASK_TOKEN)
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
        save(model, root / case)
        write_outputs(root / case, target, features, greedy_drafts(logits, model.d2t))
