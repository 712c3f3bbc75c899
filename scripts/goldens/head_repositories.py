"""Compare the written DFlash and DSpark goldens with the models of their producers' repositories."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from goldens.dflash_heads import CAPTURES, CASES, MASK_TOKEN
from goldens.head_cases import Target


def _deepspec(case: str) -> type | None:
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    return Qwen3DSparkModel if CASES[case]["format"] == "DeepSpec" else None


def _jetspec(case: str) -> type | None:
    from jetspec.models.draft_head import DFlashDraftModel

    return DFlashDraftModel if case in ("dflash", "dflash-causal") else None


def _specforge(case: str) -> type | None:
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    return {"dflash": DFlashDraftModel, "dspark-gated": DSparkDraftModel}.get(case)


_PUBLISHED = {"deepspec": _deepspec, "jetspec": _jetspec, "specforge": _specforge}
"""The class of a case by the package in a repository; None for cases that are another's."""


def _drafts(model: torch.nn.Module, target: Target, features: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Drafts [1, K] and their logits [1, K, V] of a block of `size` rows."""
    anchor, positions = target.tokens[-1:], torch.arange(len(features) + size)[None]
    tokens = torch.cat([anchor, torch.full((size - 1,), MASK_TOKEN)])[None]
    embedding = model.embed_tokens.weight if hasattr(model, "embed_tokens") else target.embedding
    inputs = {"position_ids": positions, "noise_embedding": embedding[tokens]}
    if hasattr(model, "_forward_backbone"):
        rows = model._forward_backbone(target_hidden_states=features[None], is_causal=False, **inputs)
        logits = model.compute_logits(rows)
        return model.sample_draft_tokens(logits, first_prev_token_ids=anchor, hidden_states=rows)
    causal = {"is_causal": model.causal_head} if hasattr(model, "causal_head") else {}
    rows = model(target_hidden=features[None], **inputs, **causal)
    markov = getattr(model, "markov_head", None)
    if markov is None:
        logits = (rows @ target.lm_head.T)[:, 1:]
        return logits.argmax(-1), logits
    return markov.sample_block_tokens(
        rows @ target.lm_head.T, first_prev_token_ids=anchor, hidden_states=rows
    )


def compare(goldens: Path, repository: Path) -> list[str]:
    """Raise if what a repository computes differs from a golden; returns the cases that it computes."""
    sys.path.insert(0, str(repository))
    package = next(name for name in _PUBLISHED if (repository / name).is_dir())
    target, compared = Target("llama-tied"), []
    for case in CASES:
        published = _PUBLISHED[package](case)
        if published is None:
            continue
        folder = goldens / case / "checkpoint"
        stored = json.loads((folder / "config.json").read_text())
        config = Qwen3Config(**stored, attn_implementation="eager")
        with torch.no_grad():
            model = published(config).eval()
            model.load_state_dict(load_file(folder / "model.safetensors"))
            golden = load_file(goldens / case / "outputs.safetensors")
            drafts, logits = _drafts(model, target, target.features(CAPTURES), stored["block_size"])
        torch.testing.assert_close(drafts, golden["draft_tokens"])
        torch.testing.assert_close(logits, golden["draft_logits"], rtol=1e-4, atol=2e-5)
        compared.append(case)
    return compared
