"""Compare tokens of engines over several devices with those on one device, for small random networks.

    python scripts/check_devices.py [--devices 2] [--only "NAME; NAME; ..."]

Greedy and sampled tokens in float32 are equal, except where two tokens are equally likely up to rounding,
because sums over devices round differently. A difference is shown with the position where it begins; most
answers have none.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import numpy as np
from bench.engines import build_engine
from bench.shapes import Shape
from jaxspec_kernels.paged_attention import paged_attention

from jaxspec.config import EngineConfig
from jaxspec.engine import Engine

_SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 24}
_LATENT = {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "sliding_window": 24,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}
_COMPRESSED = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 24,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "o_groups": 8,
    "o_lora_rank": 32,
}

CASES: Mapping[str, tuple[Shape, int]] = {
    "llama, eagle3": (Shape({"model_type": "llama", **_SIZES}, draft_vocab_size=512), 3),
    "llama, eagle1": (Shape({"model_type": "llama", **_SIZES}, drafter="eagle1"), 3),
    "llama tied, eagle3": (
        Shape({"model_type": "llama", **_SIZES, "tie_word_embeddings": True}, draft_vocab_size=512),
        3,
    ),
    "qwen3, plain": (Shape({"model_type": "qwen3", **_SIZES, "head_dim": 32}), 0),
    "one key/value head, eagle3": (
        Shape({"model_type": "llama", **_SIZES, "num_key_value_heads": 1}, draft_vocab_size=512),
        3,
    ),
    "gpt_oss, eagle3": (
        Shape(
            {"model_type": "gpt_oss", **_SIZES, **_EXPERTS, "intermediate_size": 256}, draft_vocab_size=512
        ),
        3,
    ),
    "gpt_oss by experts, eagle3": (
        Shape({"model_type": "gpt_oss", **_SIZES, **_EXPERTS, "intermediate_size": 96}, draft_vocab_size=512),
        3,
    ),
    "gpt_oss in MXFP4 and bfloat16, eagle3": (
        Shape(
            {"model_type": "gpt_oss", **_SIZES, **_EXPERTS, "intermediate_size": 256},
            packed_experts=True,
            draft_vocab_size=512,
        ),
        3,
    ),
    "glm4_moe_lite, mtp": (Shape({**_SIZES, **_LATENT}, drafter="mtp"), 3),
    "glm4, eagle1": (Shape({"model_type": "glm4", **_SIZES, "head_dim": 32}, drafter="eagle1"), 3),
    "gemma3, eagle3": (Shape({**_SIZES, **_GEMMA}, draft_vocab_size=512), 3),
    "deepseek_v4, mtp": (Shape({**_SIZES, **_COMPRESSED}, drafter="mtp"), 3),
}
"""Shape and K of every case, by name."""

WAYS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "top-k and top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 5},
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--devices", type=int, default=2, metavar="N")
    parser.add_argument("--only", default="; ".join(CASES), metavar="NAME; NAME; ...", help="cases to run")
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args(arguments)
    names = args.only.split("; ")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only: unknown case {unknown[0]!r}; known: {'; '.join(CASES)}")
    kernels = paged_attention.why_not("triton")
    print(f"{jax.devices()[0].device_kind}, kernels: {'Triton' if kernels is None else f'no: it {kernels}'}")
    failed = False
    for name in names:
        begin = time.perf_counter()
        try:
            results = _compare(*CASES[name], args)
        except Exception:
            traceback.print_exc()
            results = ["failed"]
        failed |= any("differ" in result or "failed" in result for result in results)
        print(f"{name}: {'; '.join(results)} ({time.perf_counter() - begin:.0f} s)", flush=True)
    return failed


def _compare(shape: Shape, num_drafts: int, args: argparse.Namespace) -> list[str]:
    # Packed experts need bfloat16, where rounding often changes a token, so only the share of equal tokens
    # counts.
    dtype = "bfloat16" if shape.packed_experts else "float32"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1024, size=length).tolist() for length in (3, 130, 64, 17, 1, 300)]
    answers = []
    for devices in (1, args.devices):
        engine = _engine(shape, num_drafts, devices, dtype)
        answers.append(
            {way: _tokens(engine, prompts, args.new_tokens, **params) for way, params in WAYS.items()}
        )
        engine.close()
    one, several = answers
    verdict = _share if shape.packed_experts else _verdict
    return [f"{way} {verdict(one[way], several[way])}" for way in WAYS]


def _tokens(engine: Engine, prompts: list[list[int]], count: int, **params: Any) -> list[list[int]]:
    answers = engine.generate(prompts, **params, max_new_tokens=count)
    return [answer.token_ids for answer in answers]


def _share(one: list[list[int]], several: list[list[int]]) -> str:
    same = [np.cumprod(np.equal(x, y)).sum() / len(x) for x, y in zip(one, several, strict=True)]
    return f"{np.mean(same):.0%} of an answer the same"


def _engine(shape: Shape, num_drafts: int, devices: int, dtype: str) -> Engine:
    config = EngineConfig(
        batch_size=4,
        max_model_len=512,
        dtype=dtype,
        slot_sizes=(),
        prefill_batch_size=4,
        tensor_parallel=devices,
    )
    return build_engine(shape, config, num_drafts=num_drafts)


def _verdict(one: list[list[int]], several: list[list[int]]) -> str:
    places = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), None)
        for x, y in zip(one, several, strict=True)
    ]
    different = [f"prompt {i} from token {place}" for i, place in enumerate(places) if place is not None]
    return f"differ: {', '.join(different)}" if different else "same"


if __name__ == "__main__":
    sys.exit(main())
