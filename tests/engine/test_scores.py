"""Scores of texts are those of a plain forward pass, for every kind of attention and families with each part.

Alone and together, from shared pages, after a preemption and a failed dispatch, beside answers and updates of
the weights. Answers report the same, here for those families, and in `test_logprobs.py` for other drafters.
"""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import assert_close, golden_folder, golden_outputs
from options import submitted
from programs_when_run import compile_now
from target_checks import log_softmax
from tiny_engines import ATTENTION, SIZES, assert_idle, assert_scored, limit_pages, tokens_of
from tiny_models import changed, on_device

import jaxspec
from jaxspec import AsyncEngine, EngineError, SamplingParams
from jaxspec.engine.device import score as score_module
from jaxspec.engine.device.plan import Size
from jaxspec.jax_settings import platform
from jaxspec.sampling import Logprobs

FAMILIES = ("llama-tied", "qwen3-windowed", "gemma3", "gpt-oss", "glm4-moe-lite", "qwen3-5")
"""One of each kind of attention, with experts, sinks, scaled embeddings and a state. What a family's forward
pass gives for each layer is compared with transformers in `models`, for every family."""
LENGTHS = (3, 17, 1, 96, 30, 41, 8)
"""Shorter and longer than a chunk, a single token, all positions, at the edge of a page."""
VOCABULARY = 48


def texts(seed=0, lengths=LENGTHS):
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCABULARY, size=length).tolist() for length in lengths]


def assert_scores(scores, given, forward, top=20, bound=1e-4):
    """Asserts that they are those of a forward pass, whose logits [T, V] of a text `forward` gives."""
    width = max(map(len, given))
    assert scores.logprobs.shape == scores.mask.shape == scores.tokens.shape == (len(given), width)
    assert scores.top_tokens.shape == scores.top_logprobs.shape == (len(given), width, top)
    assert (scores.logprobs.dtype, scores.top_tokens.dtype) == (np.float32, np.int32)
    for i, text in enumerate(given):
        size = len(text)
        assert (scores.lengths[i], scores.tokens[i, :size].tolist()) == (size, text)
        assert scores.mask[i].tolist() == [0 < t < size for t in range(width)]
        expected = log_softmax(forward(text))[:-1]
        found = scores.logprobs[i]
        assert not found[~scores.mask[i]].any()
        of_tokens = expected[np.arange(size - 1), text[1:]]
        np.testing.assert_allclose(found[1:size], of_tokens, atol=bound, rtol=0)
        best = np.sort(expected)[:, ::-1][:, :top]
        np.testing.assert_allclose(scores.top_logprobs[i, 1:size], best, atol=1e-4, rtol=0)
        of_top = np.take_along_axis(expected, scores.top_tokens[i, 1:size], axis=-1)
        np.testing.assert_allclose(of_top, best, atol=1e-4, rtol=0)
        assert not scores.top_tokens[i, size:].any()


@pytest.mark.parametrize("kind", ATTENTION)
def test_they_are_those_of_a_plain_forward_pass(engines_of, forward_of, kind, monkeypatch):
    # Three chunks at a time, whose logits are computed one chunk after another.
    monkeypatch.setattr(score_module, "ROWS", 8)
    engine = engines_of[kind].load("ngram", prefill_batch_size=3, sampling_modes=("greedy",))
    engine.forget_prefixes()
    given = texts()
    alone = [engine.score(text, top=20) for text in given]
    engine.forget_prefixes()
    together, again = engine.score(given, top=20), engine.score(given, top=20)
    engine.forget_prefixes()
    warm = engine.score(given, temperature=0.7)
    limit_pages(engine, 13, monkeypatch)
    preempted = engine.score(given, top=20)

    def forward(text):
        return forward_of(kind, text)

    for text, scores in zip(given, alone, strict=True):
        assert_scores(scores, [text], forward)
    for scores in (together, again, preempted):
        assert_scores(scores, given, forward)
    # The temperature divides logits, and with them what is rounded.
    assert_scores(warm, given, lambda text: forward(text) / 0.7, top=0, bound=1e-4 / 0.7)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers(family):
    """And the hidden states of every layer. Answers with drafts report the same, greedy and sampled."""
    golden = golden_outputs(family)
    sizes = {"max_model_len": 48, "prefill_batch_size": 2, "sampling_modes": ("sampled",)}
    options = {"drafter": {"kind": "ngram", "num_speculative_tokens": 3}, "progress": False}
    layers = len(golden["hidden"])
    asked = {"top": 3, "hidden": (*range(layers), "last")}
    prompts = np.tile(golden["input_ids"][:, :10], 3).tolist()  # so that drafts are found
    with jaxspec.load(golden_folder(family), **options, **{**SIZES, **sizes}) as engine:
        scores = engine.score(golden["input_ids"], **asked)
        for way in ({}, {"temperature": 1.0, "seed": 3}):
            answers = engine.generate(prompts, max_new_tokens=18, ignore_eos=True, logprobs=0, **way)
            assert sum(answer.stats.drafted for answer in answers)
            assert_scored(engine, answers, **asked)
    expected = log_softmax(golden["logits"].astype(np.float64))[:, :-1]
    of_tokens = np.take_along_axis(expected, golden["input_ids"][:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores.logprobs[:, 1:], of_tokens, atol=1e-4, rtol=0)
    best = np.sort(expected)[..., ::-1][..., :3]
    np.testing.assert_allclose(scores.top_logprobs[:, 1:], best, atol=1e-4, rtol=0)
    for layer in range(layers):
        assert_close(scores.hidden[layer], golden["hidden"][layer])
    assert_close(scores.hidden["last"], golden["normed"])


def test_texts_that_begin_alike_share_what_was_said(tiny_engines, forward_of):
    """In one call, in later ones, and while what they share is still being computed."""
    engine = tiny_engines.load("ngram", prefill_batch_size=3, sampling_modes=("greedy",))
    engine.forget_prefixes()
    (head,) = texts(1, [45])
    given = [[*head, 1, 2, 3], [*head, 1, 2, 4], head[:20], [*head, *head[:30]]]

    def rows_of(*args, **kwargs):
        assert engine.wait_idle(60)
        before = engine.counters.prompt_rows_used
        scores = engine.score(*args, **kwargs)
        return engine.counters.prompt_rows_used - before, scores

    def forward(text):
        return forward_of("full", text)

    cold, first = rows_of(given, top=5)
    warm, second = rows_of(given, top=5)
    # All but the last page: 5 of 48 tokens, of 20 only 2, and of 75 first 5, then 9.
    assert (cold, warm) == (48 + (48 - 40) + (20 - 16) + (75 - 40), 8 + 8 + 4 + 3)
    for scores in (first, second):
        assert_scores(scores, given, forward, top=5)
    # Who is told something else finds nothing, and neither does an answer, nor does it give anything away.
    for options in ({"temperature": 2.0}, {}, {"top": 20, "hidden": (1,)}, {"top": 20, "hidden": (1,)}):
        assert rows_of(head, **options)[0] == 45, options
    assert [engine.generate(head, max_new_tokens=2).cached_tokens for _ in range(2)] == [0, 40]
    assert rows_of(head, top=1)[0] == 5
    engine.forget_prefixes()
    assert rows_of(head, top=1)[0] == 45


def test_pages_forgotten_while_they_are_used(tiny_engines, forward_of):
    engine = tiny_engines.load("ngram", prefill_batch_size=3, sampling_modes=("greedy",))
    given = texts(2, [90, 60, 33])
    engine.score(given, top=1)
    is_over = threading.Event()

    def forget():
        while not is_over.is_set():
            engine.forget_prefixes()

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        for _ in range(5):
            assert_scores(engine.score(given, top=1), given, lambda text: forward_of("full", text), top=1)
    finally:
        is_over.set()
        thread.join()


def test_a_failed_dispatch_costs_nothing(tiny_engines, forward_of, monkeypatch):
    engine = tiny_engines.load("ngram", prefill_batch_size=3, sampling_modes=("greedy",))
    engine.forget_prefixes()
    given, number = texts(), iter(range(1000))
    dispatch = engine.programs.enqueue

    def failing(*args, size):
        result = dispatch(*args, size=size)
        if next(number) == 4:
            jax.block_until_ready(result)
            raise jax.errors.JaxRuntimeError("INTERNAL: the bus fell off")
        return result

    monkeypatch.setattr(engine.programs, "enqueue", failing)
    assert_scores(engine.score(given, top=20), given, lambda text: forward_of("full", text))
    assert next(number) > 10


def test_answers_stream_meanwhile(tiny_engines, prompts, compiled, forward_of):
    """From several threads, two of them with constraints, and nothing is compiled after the first calls."""
    engine = tiny_engines.load("ngram", sampling_modes=("greedy",))
    given, way = texts(), {"max_new_tokens": 40, "ignore_eos": True}
    ways = [
        {**way, **more}
        for more in ({}, {"no_repeat_ngram_size": 2, "logit_bias": {7: 3.0}}, {}, {"repetition_penalty": 1.4})
    ]
    expected = tokens_of(engine.generate(prompts[:4], ways))
    first = engine.score(given, top=20)
    assert_scores(first, given, lambda text: forward_of("full", text))
    is_over, streamed, scored = threading.Event(), [], []
    engine.wait_prepared(60)
    compile_now(engine.programs)
    before = len(compiled)

    def stream(i):
        while not is_over.is_set():
            *_, last = engine.stream(prompts[i], **ways[i])
            streamed.append((i, last.generation.token_ids))

    def score():
        scored.extend(engine.score(given, top=20) for _ in range(4))

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(4)]
    scorers = [threading.Thread(target=score) for _ in range(2)]
    for thread in (*threads, *scorers):
        thread.start()
    for thread in scorers:
        thread.join()
    is_over.set()
    for thread in threads:
        thread.join()
    assert compiled[before:] == []
    assert len(streamed) >= 4
    assert all(tokens == expected[i] for i, tokens in streamed)
    for scores in scored:
        np.testing.assert_allclose(scores.logprobs, first.logprobs, atol=1e-5)
    assert len(scored) == 8


def test_layers_may_be_numbers_of_numpy_and_jax(tiny_engines, prompts):
    engine = tiny_engines.load("eagle3", 7)
    expected = engine.score(prompts, hidden=(0, 1)).hidden
    for hidden in ([np.int64(0), jnp.int32(1)], np.arange(2), jnp.arange(2)):
        found = engine.score(prompts, hidden=hidden).hidden
        assert list(map(type, found)) == [int, int]
        np.testing.assert_array_equal(found[1], expected[1])
    for hidden in (np.int64(1), jnp.int32(1)):
        np.testing.assert_array_equal(engine.score(prompts, hidden=hidden).hidden[1], expected[1])
    for hidden in (True, np.bool_(True), 1.5, np.float32(1), [None]):
        with pytest.raises(ValueError, match=r"^hidden must be of 0 to "):
            engine.score(prompts, hidden=hidden)


def test_tasks_ask_for_scores_and_samples(tiny_engines, prompts, forward_of):
    """Beside one another; a cancelled task leaves nothing behind, and too many requests are refused."""
    engine = tiny_engines.load("eagle3", 7)
    given, way = texts(), {"temperature": 1.0, "seed": 3, "max_new_tokens": 9}
    expected = engine.generate(prompts[1], n=3, **way)

    async def ask():
        client = AsyncEngine(engine, max_unfinished=13)
        answers, scores, samples = await asyncio.gather(
            client.generate(prompts[1], n=3, **way),
            client.score(given, top=20),
            client.sample(prompts[1], n=3, **way),
        )
        with submitted(engine) as requests:
            task = asyncio.create_task(client.score([[1] * 96] * 9, hidden=(0, 1, 2)))
            while not requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert client.num_unfinished == 0
        assert engine.wait_idle(60)
        assert requests[-1].finish_reason == "aborted"
        with pytest.raises(jaxspec.QueueFullError, match="0 requests are unfinished, and 14 more are not"):
            await client.score([[1]] * 14)
        return answers, scores, samples

    answers, scores, samples = asyncio.run(ask())
    assert tokens_of(answers) == tokens_of(samples.generations) == tokens_of(expected)
    assert_scores(scores, given, lambda text: forward_of("full", text))


def test_no_update_comes_between_what_belongs_together(tiny_engines, prompts):
    """Scores and samples, of more requests than there are slots, are of one version of the weights."""
    folder, given = tiny_engines.folders["target"], texts(3, [40] * 9)
    weights = [on_device(changed(folder, seed)) for seed in (0, 1)]
    way = {"n": 3, "temperature": 1.0, "seed": 5, "max_new_tokens": 12, "ignore_eos": True}
    drafter = {"kind": "ngram", "num_speculative_tokens": 3}
    with jaxspec.load(folder, drafter=drafter, progress=False, **SIZES) as engine:
        expected = []
        for each in weights:
            engine.update_weights(each)
            expected.append((engine.score(given).logprobs, np.asarray(engine.sample(prompts, **way).tokens)))
        assert np.abs(expected[0][0] - expected[1][0]).max() > 0.1
        is_over, found, aborted = threading.Event(), [], []

        def ask(i):
            while not is_over.is_set():
                try:
                    if i % 2:
                        scores = engine.score(given)
                        found.append((0, scores.weights_version, scores.logprobs))
                    else:
                        samples = engine.sample(prompts, **way)
                        found.append((1, samples.weights_version, np.asarray(samples.tokens)))
                except EngineError as error:
                    aborted.append(str(error))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for i in range(30):
            engine.update_weights(weights[i % 2], in_flight="abort" if i % 5 == 4 else "finish")
        is_over.set()
        for thread in threads:
            thread.join()
        assert_idle(engine)
    assert len({version for _, version, _ in found}) > 5
    for what, version, values in found:
        np.testing.assert_allclose(values, expected[(version - 1) % 2][what], atol=1e-5)
    assert all("aborted: the weights were replaced" in each for each in aborted)


def test_hidden_states_and_lengths(tiny_engines, forward_of):
    """Rows of an array may be padded; one layer may be asked for by itself."""
    engine = tiny_engines.load("ngram", prefill_batch_size=3, sampling_modes=("greedy",))
    given = texts(4, [20, 5])
    rows = np.full((2, 24), 7)
    for row, text in zip(rows, given, strict=True):
        row[: len(text)] = text
    whole = engine.score(given, hidden=(0, 2, "last"))
    cut = engine.score(jax.numpy.asarray(rows), lengths=[20, 5], hidden="last")
    assert cut.tokens.shape == (2, 24)
    assert not cut.tokens[:, 20:].any()
    np.testing.assert_allclose(cut.logprobs[:, :20], whole.logprobs, atol=1e-5)
    assert list(cut.hidden) == ["last"]
    np.testing.assert_allclose(cut.hidden["last"][:, :20], whole.hidden["last"], atol=1e-5)
    assert list(whole.hidden) == [0, 2, "last"]
    assert not whole.hidden[0][1, 5:].any()
    embedded = np.asarray(engine.target.embed(np.asarray(given[0])))
    np.testing.assert_allclose(whole.hidden[0][0], embedded, atol=1e-6)
    nothing = engine.score([])
    assert nothing.logprobs.shape == (0, 0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sequences": [[1], []]}, "sequence 1: prompt is empty"),
        ({"sequences": [[1], [48]]}, "sequence 1: prompt: token id 48 is outside the vocabulary of 48"),
        ({"sequences": [[1] * 97]}, "sequence 0 of 97 tokens: max_model_len is 96"),
        ({"sequences": "text"}, "sequence 0: prompt: text needs a tokenizer"),
        ({"sequences": 3}, "prompt must be a string"),
        ({"top": 21}, "top must be an integer, 0 to 20, got 21"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"hidden": (3,)}, r"hidden must be of 0 to 2 and 'last', got 3"),
        ({"hidden": "first"}, r"hidden must be of 0 to 2 and 'last', got 'first'"),
        ({"lengths": [1]}, r"lengths: only the rows of an array \[B, T\] have lengths"),
        ({"sequences": np.ones((2, 3), int), "lengths": [1, 4]}, "lengths must be 2 integers from 1 to 3"),
    ],
)
def test_what_cannot_be_scored_is_one_line(tiny_engines, options, problem):
    engine = tiny_engines.load("ngram")
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        engine.score(**{"sequences": [1, 2], **options})
    assert "\n" not in str(error.value)


def test_logits_that_are_not_finite_fail_a_text_alone(tiny_engines):
    """An embedding row of NaN; what was read with it is not found by others."""
    folder = tiny_engines.folders["target"]
    with jaxspec.load(folder, drafter="none", progress=False, **SIZES) as engine:
        (rows,) = jax.tree.leaves(nnx.state(engine.target.embedding))
        leaves = engine.programs.leaves
        leaves[:] = [leaf.at[40].set(np.nan) if leaf is rows else leaf for leaf in leaves]
        bad, good = [1] * 20 + [40] + [2] * 20, [1] * 20
        # On a GPU earlier rows fail with it, probably as attention there multiplies 0 by NaN within a tile.
        first = 20 if platform() == "cpu" else 16
        with pytest.raises(EngineError, match=rf"sequence 1 failed: .* NaN or infinite at position {first}$"):
            engine.score([good, bad])
        assert np.isfinite(engine.score(good).logprobs).all()
        assert_idle(engine)


def test_programs_for_scores_are_apart(tiny_engines, prompts, monkeypatch):
    """Nobody else runs in them, even if they are the cheapest, and they report what was asked for."""
    engine = tiny_engines.load("ngram", prefill_batch_size=3, sampling_modes=("greedy",))
    engine.score(prompts)
    engine.score(prompts, hidden=1)
    engine.programs.compile([Size(1, 1, scores=Logprobs.CHOSEN)], progress=False)
    used = []
    dispatch = engine.programs.enqueue

    def watched(*args, size):
        used.append((size.scores, size.layers, size.width > 0))
        return dispatch(*args, size=size)

    monkeypatch.setattr(engine.programs, "enqueue", watched)
    engine.generate(prompts[4], max_new_tokens=3)
    assert {scores for scores, _, _ in used} == {Logprobs.NONE}
    used.clear()
    engine.score(prompts, hidden=1)
    assert set(used) == {(Logprobs.CHOSEN, (1,), False)}


def test_samples_are_arrays_of_the_answers(tiny_engines, prompts):
    engine = tiny_engines.load("eagle3", 7)
    way = {"temperature": 0.9, "seed": 4, "max_new_tokens": 12}
    answers = [each for of_prompt in engine.generate(prompts, n=3, logprobs=0, **way) for each in of_prompt]
    samples = engine.sample(prompts, n=3, **way)
    assert tokens_of(samples.generations) == tokens_of(answers)
    assert samples.tokens.shape == (21, 30 + 12)
    assert (samples.tokens.dtype, samples.mask.dtype, samples.logprobs.dtype) == (np.int32, bool, np.float32)
    assert samples.weights_version == 0
    tokens, mask, logprobs = map(np.asarray, (samples.tokens, samples.mask, samples.logprobs))
    for i, answer in enumerate(answers):
        start, size = len(answer.prompt_token_ids), len(answer.token_ids)
        assert (samples.prompt_lengths[i], samples.lengths[i]) == (start, start + size)
        assert tokens[i, : start + size].tolist() == answer.prompt_token_ids + answer.token_ids
        assert mask[i].tolist() == [start <= t < start + size for t in range(42)]
        np.testing.assert_allclose(logprobs[i][mask[i]], answer.logprobs, atol=1e-5)
        assert not logprobs[i][~mask[i]].any()
        assert not tokens[i, start + size :].any()
    scores = engine.score(samples.tokens, lengths=samples.lengths)
    np.testing.assert_allclose(np.where(mask, scores.logprobs, 0), logprobs, atol=1e-4)
    assert engine.sample(prompts[0], params=SamplingParams(**way), length=50).tokens.shape == (1, 50)
    drawn = engine.sample(prompts[1], logprobs_mode="processed_logprobs", **way)
    warm = engine.score(drawn.tokens, lengths=drawn.lengths, temperature=0.9)
    np.testing.assert_allclose((warm.logprobs * np.asarray(drawn.mask)), drawn.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n": 0}, "n must be an integer, 1 or more, got 0"),
        ({"length": 13}, "length must be an integer, 14 or more, got 13"),
        ({"logprobs": 2}, "logprobs: samples have those of their own tokens, and no others"),
        ({"max_new_tokens": 200}, "max_new_tokens: 200 do not fit"),
    ],
)
def test_what_cannot_be_an_array_of_samples_is_one_line(tiny_engines, options, problem):
    engine = tiny_engines.load("ngram")
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        engine.sample([1, 2], **{"max_new_tokens": 12, **options})
    assert "\n" not in str(error.value)
