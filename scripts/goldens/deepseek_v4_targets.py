"""DeepSeek-V4 targets: transformers on random weights, the logits of a long text and greedy answers.

transformers 5.23 and 5.24 write the same weights and outputs.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from goldens.targets import random_weight

LENGTH, SLOTS, PROMPT, TRIED = 300, 8, 20, 48
WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,  # texts are longer
}
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 6,
    "index_n_heads": 12,
    "index_head_dim": 8,
    "index_topk": 6,
    "hc_mult": 4,
    "num_hash_layers": 1,
    "swiglu_limit": 1.5,
    "rms_norm_eps": 1e-3,
    "bos_token_id": None,
    "eos_token_id": None,
}
CASES: dict[str, dict] = {
    "deepseek-v4": {
        "layer_types": [WINDOW, SPARSE, HEAVY, SPARSE],
        "compress_rates": {SPARSE: 4, HEAVY: 32},
        "rope_scaling": YARN,
    },
    "deepseek-v4-odd-ratios": {
        "layer_types": [SPARSE, HEAVY, WINDOW],
        "compress_rates": {SPARSE: 3, HEAVY: 7},
        "sliding_window": 5,
        "index_topk": 3,
        "hc_mult": 3,
        "num_hash_layers": 0,
        "hc_sinkhorn_iters": 3,
    },
    "deepseek-v4-one-group": {
        "layer_types": [SPARSE, SPARSE],
        "compress_rates": {SPARSE: 8, HEAVY: 16},
        "sliding_window": 2,
        "o_groups": 1,
        "hc_mult": 2,
        "num_hash_layers": 2,
        "partial_rotary_factor": 0.25,
        "routed_scaling_factor": 0.7,
    },
    "deepseek-v4-wide-window": {
        "layer_types": [HEAVY, SPARSE, HEAVY],
        "compress_rates": {SPARSE: 2, HEAVY: 128},
        "sliding_window": 70,
        "index_topk": 150,  # every entry
        "o_groups": 4,
        "num_hash_layers": 2,
        "compress_rope_theta": 4000.0,
    },
    "deepseek-v4-default-layers": {
        "num_hidden_layers": 4,
        "compress_rates": {SPARSE: 5, HEAVY: 11},
        "sliding_window": 16,
        "index_topk": 2,
        "partial_rotary_factor": 1.0,
        "hc_mult": 1,
        "num_hash_layers": 0,
        "rope_scaling": {**YARN, "factor": 16.0, "original_max_position_embeddings": 16},
    },
    "deepseek-v4-windows": {
        "layer_types": [WINDOW, WINDOW],
        "sliding_window": 33,
        "rope_theta": 500.0,
        "num_experts_per_tok": 6,
        "num_hash_layers": 1,
    },
}


def prepare(model: DeepseekV4ForCausalLM, generator: torch.Generator) -> None:
    """Fills a model with random weights; matrices are larger where a wrong one would otherwise not show."""
    for name, parameter in model.named_parameters():
        weight = random_weight(name, parameter.shape, generator)
        if name.endswith("_proj.weight") or "experts" in name or "gate.weight" in name:
            weight = 3 * weight
        parameter.data = weight
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if hasattr(gate, "tid2eid"):
            shares = torch.rand(gate.tid2eid.shape[0], gate.num_experts, generator=generator)
            gate.tid2eid.copy_(shares.argsort(dim=1)[:, : gate.top_k])
        else:
            gate.e_score_correction_bias.copy_(0.3 * torch.randn(gate.num_experts, generator=generator))


def build(case: str, seed: int) -> tuple[DeepseekV4ForCausalLM, torch.Generator]:
    """The model of a case, and the generator from which its texts are drawn."""
    changes = dict(CASES[case])
    if "layer_types" in changes:
        changes["num_hidden_layers"] = len(changes["layer_types"])
    config = DeepseekV4Config(**{**SHAPE, **changes}, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    prepare(model, generator)
    return model, generator


@torch.no_grad()
def run(model: DeepseekV4ForCausalLM, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B,S,V] of texts [B,S], and how clear the closest choice of entries and experts was, [B].

    That is how far the last that was chosen is ahead of the next, relative to its score; infinity where all
    are chosen.
    """
    ahead = [torch.full((len(texts),), float("inf"))]

    def watch(scores: torch.Tensor, keep: int) -> None:
        """Takes scores [B,S,N], -inf for what cannot be chosen."""
        if keep < scores.shape[-1]:
            last, after = scores.topk(keep + 1, dim=-1).values[..., -2:].unbind(-1)
            ahead.append(((last - after) / last.abs()).masked_fill(after.isinf(), float("inf")).amin(dim=1))

    def entries(indexer: v4.DeepseekV4Indexer, scores: torch.Tensor) -> None:
        count = (torch.arange(scores.shape[1]) + 1)[:, None] // indexer.compress_rate
        watch(scores.masked_fill(torch.arange(scores.shape[-1]) >= count, float("-inf")), indexer.index_topk)

    def experts(router: v4.DeepseekV4TopKRouter, logits: torch.Tensor) -> None:
        scores = router.score_fn(logits) + router.e_score_correction_bias
        watch(scores.reshape(*texts.shape, -1), router.top_k)

    hooks = []
    for module in model.modules():
        if isinstance(module, v4.DeepseekV4Indexer):
            scorer = module.scorer
            hooks.append(scorer.register_forward_hook(lambda _, args, out, of=module: entries(of, out)))
        if isinstance(module, v4.DeepseekV4TopKRouter):
            hooks.append(module.register_forward_hook(lambda of, args, out: experts(of, out[0])))
    logits = model(texts, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(ahead).amin(dim=0)


@torch.no_grad()
def greedy(model: DeepseekV4ForCausalLM, prompts: torch.Tensor) -> torch.Tensor:
    """Of prompts [B,PROMPT], those with the clearest greedy answers, and the answers, [SLOTS,LENGTH].

    Raises:
      AssertionError: a token or a choice is so little ahead of the next that rounding could change it.
    """
    output = model.generate(
        prompts,
        max_new_tokens=LENGTH - prompts.shape[1],
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(output.logits).topk(2, dim=-1).values
    _, ahead = run(model, output.sequences)
    # Not a number where scores are zero, and so equal.
    is_clear = ((best[..., 0] - best[..., 1]).amin(dim=0) > 3e-4) & (ahead > 5e-5)
    rows = is_clear.nonzero()[:SLOTS, 0]
    assert len(rows) == SLOTS, is_clear
    return output.sequences[rows]


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, case in enumerate(CASES, start=601):
        model, generator = build(case, seed)
        texts = torch.randint(3, model.config.vocab_size, (SLOTS, LENGTH), generator=generator)
        prompts = torch.randint(3, model.config.vocab_size, (TRIED, PROMPT), generator=generator)
        logits, ahead = run(model, texts)
        clearest = ahead.nan_to_num().argmax()
        assert ahead[clearest] > 5e-5, ahead
        answers = greedy(model, prompts)
        model.save_pretrained(root / case / "checkpoint")
        tensors = {
            "input_ids": texts[clearest, None].int(),
            "logits": logits[clearest, None],
            "greedy": answers.int(),
        }
        save_file({name: t.contiguous() for name, t in tensors.items()}, root / case / "outputs.safetensors")
