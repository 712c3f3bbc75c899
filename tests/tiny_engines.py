"""Engines over the networks of `tiny_models`, each compiled once, and helpers around them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from extensions import write_bigram
from tiny_models import perturb, write_dflash, write_eagle1, write_eagle3, write_peagle, write_target
from tiny_mtp import LATENT, write_with_mtp

import jaxspec
from jaxspec import Engine, Generation
from jaxspec.engine.pages import PagePool

SIZES = {
    "batch_size": 3,
    "max_model_len": 96,
    "page_size": 8,
    "prefill_chunk": 8,
    "prefill_rows": 1,
    "slot_sizes": (),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "indexed window": {
        "model_type": "jaxspec_indexed_window",
        "sliding_window": 6,
        "compress_ratios": [1, 4],
    },
    "latent": LATENT,
    "own family": {"model_type": "parallel", "attention_multiplier": 1.0, "seed": 1},
}
"""The kinds of attention, and the family of docs/adding-a-family.md, as changes to `tiny_models.TARGET`;
tests of every kind run over these."""
DRAFTERS = {"ngram": 3, "eagle3": 7, "eagle1": 5, "near": 7, "peagle": 7, "dflash": 7, "mtp": 7, "bigram": 3}
"""Every drafter by name, the last from docs/writing-a-drafter.md, and K where tests run it over every
attention."""
ONLY_OVER = {"mtp": ("latent",), "bigram": ("full", "own family")}
PAIRS = [(kind, name) for kind in ATTENTION for name in DRAFTERS if kind in ONLY_OVER.get(name, ATTENTION)]
"""Every drafter over every kind of attention that it fits, and that it could tell from others."""
MOST_LOADED = 6
"""Engines of one kind of attention that are kept; more than any test holds."""
KINDS = {"self": "draft_model", "near": "draft_model"}


@dataclass
class TinyEngines:
    """A target of 48 tokens, drafters for it by name, and the engines loaded last.

    "eagle3", "eagle1", "peagle", "dflash" and "mtp" (over latent attention alone) repeat the last token, the
    same names after "random" are noise, "bigram" is a table, "self" is the target itself, "near" a noisy copy
    of it, "ngram" and "none" need no weights. `attention` is the kind of the target and of its copies; EAGLE
    heads over one with a window have a window, too.
    """

    root: Path
    attention: str = "full"
    folders: dict[str, Path] = field(init=False)
    loaded: dict[Any, Engine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        changes = ATTENTION[self.attention]
        target = write_target(self.root / "target", **changes)
        window = changes.get("sliding_window")
        self.folders = {
            "target": target,
            "eagle3": write_eagle3(self.root / "eagle3", target, window=window),
            "eagle1": write_eagle1(self.root / "eagle1", target, window=window),
            "peagle": write_peagle(self.root / "peagle", target),
            "dflash": write_dflash(self.root / "dflash", target),
            "random eagle3": write_eagle3(self.root / "random_eagle3", target, repeats=False),
            "random eagle1": write_eagle1(self.root / "random_eagle1", target, repeats=False),
            "random peagle": write_peagle(self.root / "random_peagle", target, repeats=False),
            "random dflash": write_dflash(self.root / "random_dflash", target, repeats=False, window=5),
            "self": target,
            "near": perturb(target, self.root / "near", scale=0.1),
            "bigram": write_bigram(self.root / "bigram"),
        }
        if self.attention == "latent":
            self.folders["mtp"] = write_with_mtp(self.root / "mtp", target)

    def load(
        self, name: str = "none", k: int = 3, *, sampling: str = "probabilistic", **engine: Any
    ) -> Engine:
        """The engine of a drafter, of K drafts; the same arguments give the same engine again."""
        key = (name, k, sampling, *sorted(engine.items()))
        if key in self.loaded:
            self.loaded[key] = self.loaded.pop(key)  # the newest again
        else:
            # Compiled programs take up to 100 MB an engine.
            while len(self.loaded) >= MOST_LOADED:
                self.loaded.pop(next(iter(self.loaded))).close()
            drafter: dict[str, Any] = {"kind": KINDS.get(name, name.split()[-1]), "sampling": sampling}
            if name != "none":
                drafter["num_speculative_tokens"] = k
            if name in self.folders:
                drafter["source"] = str(self.folders[name])
            self.loaded[key] = jaxspec.load(
                self.folders["target"], drafter=drafter, progress=False, **{**SIZES, **engine}
            )
        return self.loaded[key]

    def close(self) -> None:
        """Closes all engines and forgets them."""
        while self.loaded:
            self.loaded.popitem()[1].close()


def tokens_of(generations: Iterable[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def compile_all(engine: Engine) -> None:
    """Compiles what an engine compiles behind its back, which in tests it does not (conftest.py)."""
    left = [size for size in engine.core.later_sizes if size not in engine.programs.compiled]
    engine.programs.compile(left, progress=False)


def leave_pages(engine: Engine, count: int, monkeypatch: Any) -> None:
    """Has an idle engine do with so many pages, in the programs that it has."""
    engine.forget_prefixes()
    assert engine.wait_idle(timeout=60)
    monkeypatch.setattr(engine.core.scheduler, "pages", PagePool(count, engine.config.page_size))


def start_afresh(engine: Engine) -> None:
    """Empties the cache and sorts the free pages, so that engines that do the same hold the same."""
    pages = engine.core.scheduler.pages
    pages.clear()
    pages._free.sort(reverse=True)
    state = engine.core.state
    engine.core.state = replace(
        state,
        target_cache=jax.tree.map(jnp.zeros_like, state.target_cache),
        draft_cache=jax.tree.map(jnp.zeros_like, state.draft_cache),
    )


def assert_idle(engine: Engine) -> None:
    """No slot is taken, no request waits, and every page is free or kept, once."""
    assert engine.wait_idle(timeout=60)
    scheduler = engine.core.scheduler
    assert not scheduler.waiting
    assert scheduler.slots == [None] * scheduler.batch_size
    pages = scheduler.pages
    assert sorted([*pages._free, *pages._unused]) == list(range(1, pages.num_pages + 1))
    assert not pages._users
    assert sorted(pages._kept.values()) == sorted(pages._unused)
