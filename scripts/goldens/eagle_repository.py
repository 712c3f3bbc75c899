"""Compare the written goldens with the draft models of a checkout of SafeAILab/EAGLE."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor

from goldens import eagle1_heads, eagle3_safeailab
from goldens.head_cases import DRAFTS, Target


def published_model(case: Path, target: Target) -> torch.nn.Module:
    """The repository's `Model` with the checkpoint of `case`, or the target's embedding if that has none."""
    from eagle.model import cnets, cnets1

    # Replaces EConfig, because transformers 5 adds rope settings to every PretrainedConfig.
    stored = json.loads((case / "checkpoint" / "config.json").read_text())
    config = SimpleNamespace(rope_scaling=None, pretraining_tp=1, **stored)
    module = cnets if "draft_vocab_size" in stored else cnets1
    model = module.Model(config, bias=stored.get("bias", True))
    weights = load_file(case / "checkpoint" / "model.safetensors")
    missing, spare = model.load_state_dict(weights, strict=False)
    if spare or set(missing) - {"embed_tokens.weight"}:
        raise ValueError(f"{case.name}: missing {missing}, spare {spare}")
    if missing:
        model.embed_tokens.weight.data = target.embedding
    model.reset()
    return model.eval()


def logits_of(model: torch.nn.Module, target: Target, hidden: Tensor) -> Tensor:
    """As `topK_genrate` takes them from the output."""
    if hasattr(model, "lm_head"):
        return model.lm_head(model.norm(hidden))
    return hidden @ target.lm_head.T


def compare(goldens: Path, repository: Path) -> None:
    """Raise if prefill or a draft step, run with the repository's KV cache, differs from a golden."""
    sys.path.insert(0, str(repository))
    cases = dict.fromkeys(eagle3_safeailab.CASES, eagle3_safeailab.TARGET)
    cases |= {case: chosen["target"] for case, chosen in eagle1_heads.CASES.items()}
    for case, name in cases.items():
        target = Target(name)
        model = published_model(goldens / case, target)
        golden = load_file(goldens / case / "outputs.safetensors")
        rows, tokens, cache = golden["features"], golden["token_ids"], None
        for index in range(DRAFTS):
            with torch.no_grad():
                hidden, cache = model(rows, input_ids=tokens, past_key_values=cache, use_cache=True)
                logits = logits_of(model, target, hidden)
            if index == 0:
                torch.testing.assert_close(hidden, golden["hidden"], rtol=1e-4, atol=2e-5)
                torch.testing.assert_close(logits, golden["logits"], rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(hidden[:, -1], golden["draft_hidden"][:, index], rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(logits[:, -1], golden["draft_logits"][:, index], rtol=1e-4, atol=2e-5)
            rows, tokens = hidden[:, -1:], golden["draft_tokens"][:, index : index + 1]
        print(f"agrees with SafeAILab/EAGLE: {case}")
