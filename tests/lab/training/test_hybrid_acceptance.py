"""Over a target with states, a trained head is accepted as often however many drafts were rejected before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint
from lab.training.test_every_family import learn, sharpen

from jaxspec import Engine, EngineConfig
from jaxspec.drafters.kinds.none import NoDrafter
from jaxspec.models.target import load_target

TEXTS, LENGTH, UPDATES = 8, 120, 40
# Without a prefix cache, so that every text is read from its beginning.
CONFIG = EngineConfig(
    batch_size=8,
    max_model_len=LENGTH,
    page_size=8,
    prefill_chunk=16,
    prefill_batch_size=4,
    slot_sizes=(),
    prefix_caching=False,
)
TOLD = {"tokenizer": None, "eos_token_ids": (), "sampling_modes": ("greedy",), "progress": False}


def engine_of(target, head):
    return Engine(target, head, config=CONFIG, **TOLD)


def test_acceptance_stays_however_many_drafts_were_rejected():
    """Every step of an answer accepts what the first step behind a prompt of the same text accepts."""
    target = load_target(golden_checkpoint("qwen3-5"), dtype=jnp.float32)
    sharpen(target, 3)
    prompts = np.asarray(jax.random.randint(jax.random.key(1), (TEXTS, 3), 3, 96)).tolist()
    with engine_of(target, NoDrafter()) as engine:
        answers = engine.generate(prompts, max_new_tokens=LENGTH - 3, ignore_eos=True)
    texts = np.asarray([[*answer.prompt_token_ids, *answer.token_ids] for answer in answers])
    trainer, _, state, _ = learn(target, [texts] * UPDATES)
    with engine_of(target, trainer.head(state)) as engine:
        k = engine.num_speculative_tokens
        answers = engine.generate(prompts, max_new_tokens=LENGTH - 3, ignore_eos=True)
        begun, accepted, rejected = [], [], []
        for answer in answers:
            text, num_rejected = [*answer.prompt_token_ids, *answer.token_ids], 0
            length = len(answer.prompt_token_ids) + 1
            for drafted, kept in answer.verified:
                if length + k + 1 < len(text):
                    begun.append(text[:length])
                    accepted.append(kept)
                    rejected.append(num_rejected)
                num_rejected += drafted - kept
                length += kept + 1
        # The last token of a text is what its prompt is answered with.
        afresh = engine.generate([text[:-1] for text in begun], max_new_tokens=k + 2, ignore_eos=True)
    expected = [answer.verified[0][1] for answer in afresh]
    accepted, expected, rejected = map(np.asarray, (accepted, expected, rejected))
    often = rejected >= 60
    assert often.sum() > 100
    assert accepted[often].mean() > 0.5
    assert np.mean(accepted != expected) < 0.02
    assert accepted[often].mean() == pytest.approx(expected[often].mean(), abs=0.02)
