"""Engines over the networks of `tiny_models`, each compiled once, with helpers."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from extensions import write_bigram
from tiny_assistant import GEMMA4, write_assistant
from tiny_models import (
    perturb,
    with_rows,
    write_dflash,
    write_eagle1,
    write_eagle3,
    write_peagle,
    write_target,
)
from tiny_mtp import COMPRESSED, LATENT, write_with_mtp

import jaxspec
from jaxspec import Engine, Generation
from jaxspec.engine.device.oracle import Oracle
from jaxspec.engine.host.pages import PagePool

SIZES = {
    "batch_size": 3,
    "max_model_len": 96,
    "page_size": 8,
    "prefill_chunk": 8,
    "prefill_batch_size": 1,
    "slot_sizes": (),
}
RECURRENT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "layer_types": ["full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""A state in the last layer, as changes to `tiny_models.TARGET`."""
MAMBA: dict[str, Any] = {
    "model_type": "nemotron_h",
    "layers_block_type": ["full_attention", "moe", "linear_attention", "mlp"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "gain": 3.5,
}
"""A state in one of four layers, of which two have neither states nor attention."""
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "compressed": COMPRESSED,
    "latent": LATENT,
    "recurrent": RECURRENT,
    "mamba": MAMBA,
    "own family": {
        "model_type": "parallel",
        "attention_multiplier": 1.0,
        "residual_multiplier": 0.7,
        "layers_without_rope": [1],
        "seed": 14,
        "gain": 1.8,
    },
}
"""The kinds of attention, and the family of docs/adding-a-family.md, as changes to `tiny_models.TARGET`;
tests of every kind run over these."""
TARGETS = ATTENTION | {"gemma4": GEMMA4}
"""Also Gemma 4, whose caches an assistant reads, and whose embedding and logits are scaled."""
DRAFTERS = {
    "ngram": 3,
    "eagle3": 7,
    "eagle1": 5,
    "near": 7,
    "peagle": 7,
    "gemma4_assistant": 7,
    "dflash": 7,
    "dspark": 8,
    "mtp": 7,
    "bigram": 3,
}
"""Every drafter by name, the last from docs/writing-a-drafter.md, and K where tests run it over every
attention."""
STATES = ("recurrent", "mamba")
"""Those with recurrent layers."""
ONLY_OVER = {
    "mtp": ("latent", "recurrent", "compressed", "mamba"),
    "gemma4_assistant": ("gemma4",),
    # Neither sees the target's attention; what verifies their drafts is the same for all drafters.
    "ngram": ("full", "recurrent"),
    "bigram": ("full",),
    # `test_compressed_engine.py` has it over compressed attention.
    "near": tuple(kind for kind in ATTENTION if kind not in (*STATES, "compressed")),
    # The second kind of state is like the first, and that family's attention is full.
    "dflash": (*(kind for kind in ATTENTION if kind not in ("mamba", "own family")), "gemma4"),
    # One by one as EAGLE-3, in the target's window if it has one, but from the last hidden state, of which
    # compressed attention keeps several streams.
    "eagle1": ("full", "sliding", "compressed"),
    # As DFlash, up to where drafts are drawn.
    "dspark": ("full", "sliding", "recurrent"),
    # All at once as DFlash, from EAGLE-3's features.
    "peagle": ("full", "latent", "recurrent"),
}
PAIRS = [(kind, name) for kind in TARGETS for name in DRAFTERS if kind in ONLY_OVER.get(name, ATTENTION)]
"""Every drafter with every kind of attention that it supports and that makes a difference to it."""
ONCE = {name: ONLY_OVER.get(name, ("full",))[0] for name in DRAFTERS}
"""Every drafter with one kind of attention, full attention if it supports that."""
IN_BOTH_MODES = [("full", "ngram"), ("full", "eagle3"), ("full", "dflash")]
"""Drafters that tests run in the programs for greedy requests, too: without a network, one by one, and all at
once. Those for sampling serve any request, and otherwise drafters share what these do."""
DRAWS = [
    ("full", "fewer rows", "probabilistic"),
    ("full", "random eagle3", "probabilistic"),
    ("full", "eagle3", "greedy"),
    ("full", "dflash", "probabilistic"),
    ("full", "random dspark", "probabilistic"),
    ("full", "ngram", "probabilistic"),
    ("full", "more rows", "probabilistic"),
]
"""Ways to draw drafts, as kind of attention, drafter and `drafter.sampling`: one by one and all at once, from
random weights, from vocabularies smaller and larger than the target's, one-hot, and without a network. Half
are asked for constraints, the others for grammars. Drafters that are not here share the code of these, and
all are in `test_distribution.py`, over logits that are not changed."""
MOST_LOADED = 30
"""The number of engines kept for one kind of attention; each takes 20 MB and 300 memory maps."""
KINDS = dict.fromkeys(("self", "near", "fewer rows", "more rows"), "draft_model")


@dataclass
class TinyEngines:
    """A target with 48 tokens, drafters for it by name, and the engines loaded most recently.

    "eagle3", "eagle1", "peagle", "dflash", "dspark", "mtp" (only with compressed and latent attention and
    states) and "gemma4_assistant" (only with Gemma 4) repeat the last token; "eagle3", "eagle1", "peagle",
    "dflash" and "dspark" after "random" have random weights. "bigram" is a table, "self" is the target
    itself, "near" is a noisy copy of it, and "ngram" and "none" have no weights. "fewer rows" and "more rows"
    are the target with 40 and 56 tokens. `attention` is a name in `TARGETS`; if the target has a window, so
    have EAGLE heads.
    """

    root: Path
    attention: str = "full"
    folders: dict[str, Path] = field(init=False)
    loaded: dict[Any, Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        changes = TARGETS[self.attention]
        target = write_target(self.root / "target", **changes)
        window = changes.get("sliding_window")
        self.folders = {
            "target": target,
            "eagle3": write_eagle3(self.root / "eagle3", target, window=window),
            "eagle1": write_eagle1(self.root / "eagle1", target, window=window),
            "peagle": write_peagle(self.root / "peagle", target),
            "dflash": write_dflash(self.root / "dflash", target),
            "dspark": write_dflash(self.root / "dspark", target, markov="vanilla"),
            "random eagle3": write_eagle3(self.root / "random_eagle3", target, repeats=False),
            "random eagle1": write_eagle1(self.root / "random_eagle1", target, repeats=False),
            "random peagle": write_peagle(self.root / "random_peagle", target, repeats=False),
            "random dflash": write_dflash(self.root / "random_dflash", target, repeats=False, window=5),
            "random dspark": write_dflash(
                self.root / "random_dspark", target, repeats=False, window=5, markov="gated"
            ),
            "self": target,
            "near": perturb(target, self.root / "near", scale=0.1),
            "fewer rows": with_rows(target, self.root / "fewer_rows", 40),
            "more rows": with_rows(target, self.root / "more_rows", 56),
            "bigram": write_bigram(self.root / "bigram"),
        }
        if self.attention in ONLY_OVER["mtp"]:
            self.folders["mtp"] = write_with_mtp(self.root / "mtp", target)
        if self.attention in ONLY_OVER["gemma4_assistant"]:
            self.folders["gemma4_assistant"] = write_assistant(self.root / "assistant", target)

    def load(
        self, name: str = "none", k: int = 3, *, sampling: str = "probabilistic", **engine: Any
    ) -> Engine:
        """The engine with a drafter and K; equal arguments return the same engine."""
        engine = {**SIZES, "sampling_modes": ("greedy", "sampled"), **engine}
        key = (name, k, sampling, *sorted(engine.items()))
        if key in self.loaded:
            self.loaded[key] = self.loaded.pop(key)  # now the most recently used
        else:
            while len(self.loaded) >= MOST_LOADED:
                self.loaded.pop(next(iter(self.loaded))).close()
            drafter: dict[str, Any] = {"kind": KINDS.get(name, name.split()[-1]), "sampling": sampling}
            if name != "none":
                drafter["num_speculative_tokens"] = k
            if name in self.folders:
                drafter["source"] = str(self.folders[name])
            self.loaded[key] = jaxspec.load(self.folders["target"], drafter=drafter, progress=False, **engine)
        return self.loaded[key]

    def close(self) -> None:
        """Closes all engines and forgets them."""
        while self.loaded:
            self.loaded.popitem()[1].close()


def modes_of(kind: str, name: str) -> tuple[str, ...]:
    """The `sampling_modes` with which tests load a pair."""
    return ("greedy", "sampled") if (kind, name) in IN_BOTH_MODES else ("sampled",)


def tokens_of(generations: Iterable[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def assert_scored(engine: Engine, answers: Iterable[Generation], **asked: Any) -> None:
    """Asserts that the log-probabilities of answers are what the engine says of the same tokens.

    Args:
      asked: further arguments of `Engine.score`, to share a program with other calls.
    """
    answers = list(answers)
    texts = [answer.prompt_token_ids + answer.token_ids for answer in answers]
    scores = engine.score(texts, **asked)
    for answer, logprobs, size in zip(answers, scores.logprobs, scores.lengths, strict=True):
        of_answer = logprobs[len(answer.prompt_token_ids) : size]
        np.testing.assert_allclose(answer.logprobs, of_answer, atol=1e-4, rtol=0)


def compile_all(engine: Engine) -> None:
    """Compiles the programs that engines compile in the background, which conftest.py turns off."""
    left = [size for size in engine.core.preparation.sizes[1] if size not in engine.programs.compiled]
    engine.programs.compile(left, progress=False)


def drive_from_python(engine: Engine, monkeypatch: Any) -> list[Any]:
    """Has the host run every step phase by phase; returns the list of the modes of the steps that it ran."""
    oracle = Oracle(engine.programs)
    ran: list[Any] = []
    step = oracle.step
    monkeypatch.setattr(oracle, "step", lambda plan, state: ran.append(plan.size.mode) or step(plan, state))
    monkeypatch.setattr(engine.programs, "enqueue", engine.programs.enqueue)  # to be undone
    oracle.take_over(engine.programs)
    return ran


def limit_pages(engine: Engine, count: int, monkeypatch: Any) -> None:
    """Restricts an idle engine to `count` pages; it keeps its programs."""
    engine.forget_prefixes()
    assert engine.wait_idle(timeout=60)
    copies = engine.config.state_copies if engine.config.has_states else None
    monkeypatch.setattr(engine.core.scheduler, "pages", PagePool(count, engine.config.page_size, copies))


def start_afresh(engine: Engine) -> None:
    """Empties the prefix cache and sorts what is free, so that equal requests use equal pages and states."""
    pages = engine.core.scheduler.pages
    pages.clear()
    pages._free.sort(reverse=True)
    pages._free_states.sort(reverse=True)
    state = engine.core.state
    engine.core.state = replace(
        state,
        target_cache=jax.tree.map(jnp.zeros_like, state.target_cache),
        draft_cache=jax.tree.map(jnp.zeros_like, state.draft_cache),
    )


def assert_idle(engine: Engine) -> None:
    """Asserts that no slot is in use, no request waits, and every page is free or kept, exactly once."""
    assert engine.wait_idle(timeout=60)
    scheduler = engine.core.scheduler
    assert not scheduler.waiting
    assert scheduler.slots == [None] * scheduler.batch_size
    pages = scheduler.pages
    assert sorted([*pages._free, *pages._unused]) == list(range(1, pages.num_pages + 1))
    assert not pages._users
    assert sorted(pages._kept.values()) == sorted(pages._unused)
