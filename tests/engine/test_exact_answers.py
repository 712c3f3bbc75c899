"""With activations of 8 bits, an answer has the same bits whatever decides when it is computed."""

from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from flax import nnx
from tiny_engines import ATTENTION
from tiny_gguf import write_packed_gguf
from tiny_models import TARGET

import jaxspec
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.engine.device.programs import Programs
from jaxspec.models.target import make_target
from jaxspec.weights import packed_weights

LENGTHS = (3, 9, 17, 24)
PROMPTS = [[(7 * i + 3 * j) % 40 + 2 for j in range(length)] for i, length in enumerate(LENGTHS)]
STRANGERS = [[(11 * i + j) % 50 + 1 for j in range(5 + 4 * i)] for i in range(4)]
ASK = {"max_new_tokens": 36, "ignore_eos": True, "logprobs": 20}
SIZES = {"max_model_len": 64, "page_size": 4, "progress": False, "exact": True}


@pytest.fixture(scope="module", autouse=True)
def _small_weights_are_packed():
    # Also while programs are traced, which is later.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """A function that answers `PROMPTS` with K drafts and some sizes, and says all that was reported."""
    path = write_packed_gguf(tmp_path_factory.mktemp("exact") / "tiny.gguf")

    @cache
    def engine_with(drafts, **sizes):
        drafter = {"kind": "ngram", "num_speculative_tokens": drafts} if drafts else {"kind": "none"}
        sizes = {"batch_size": 4, "slot_sizes": ()} | SIZES | sizes
        return engines.enter_context(jaxspec.load(path, drafter=drafter, **sizes))

    def answer(drafts=0, *, prompts=PROMPTS, times=1, asked=ASK, **sizes):
        engine = engine_with(drafts, **sizes)
        engine.forget_prefixes()
        for _ in range(times):
            given = engine.generate(prompts, **asked)
        texts = [one.prompt_token_ids + one.token_ids for one in given]
        scores = engine.score(texts).logprobs
        for one, text, score in zip(given, texts, scores, strict=True):
            assert list(score[len(one.prompt_token_ids) : len(text)]) == one.logprobs
        told = [(one.token_ids, one.logprobs, one.top_logprobs) for one in given]
        drafted = sum(one.stats.drafted for one in given)
        return told, drafted, sum(one.cached_tokens for one in given)

    with ExitStack() as engines:
        yield answer


@pytest.fixture(scope="module")
def plain(answers):
    return answers(batch_size=1)[0]


def test_answers_do_not_depend_on_drafts_and_batch(answers, plain):
    told, verified, _ = answers(3)
    assert verified
    assert told == plain


def test_answers_do_not_depend_on_strangers(answers, plain):
    """With other numbers of drafts and slots than above."""
    told, verified, _ = answers(7, prompts=[*STRANGERS, *PROMPTS], batch_size=8)
    assert verified
    assert told[len(STRANGERS) :] == plain


def test_answers_do_not_depend_on_prompts_beside_them(answers, plain):
    assert answers(3, prefill_chunk=8, mixed_prefill_tokens=64)[0] == plain


def test_answers_do_not_depend_on_cached_prefixes(answers, plain):
    told, _, cached = answers(3, times=2)
    assert cached
    assert told == plain


def test_answers_do_not_depend_on_chunks_and_being_put_back(answers, plain):
    assert answers(1, num_pages=16, prefix_caching=False, prefill_chunk=5)[0] == plain


def test_sampled_answers_do_not_depend_on_the_batch(answers):
    asked = {**ASK, "temperature": 1.0, "top_p": 0.9, "seed": list(range(len(PROMPTS)))}
    assert answers(3, asked=asked, batch_size=1)[0] == answers(3, asked=asked)[0]


@pytest.mark.cpu
@pytest.mark.parametrize(("drafts", "sizes"), [(16, {}), (3, {"prefill_chunk": 17})])
def test_more_rows_than_the_kernel_of_a_cpu_takes_are_refused(answers, drafts, sizes):
    with pytest.raises(ConfigError, match=r"engine.exact on a CPU allows 16 rows, and .* is 17"):
        answers(drafts, **sizes)


@pytest.mark.parametrize("kind", ["latent", "compressed", "recurrent", "mamba"])
def test_attention_that_has_no_kernel_for_it_is_refused(kind):
    config = ModelConfig.from_hf({**TARGET, **ATTENTION[kind]})
    target = nnx.eval_shape(lambda: make_target(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    models, settings = SimpleNamespace(target=target), SimpleNamespace(exact=True)
    with pytest.raises(ConfigError, match=f"not supported for {config.family}: .* no kernel"):
        Programs(models, settings, state=None, mesh=None)
