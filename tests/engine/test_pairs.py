"""What holds for every drafter over the kinds of attention that make a difference to it.

Each pair's engine is compiled once for all tests.

The draft loop driven from Python is the oracle of the compiled one. Pages hold eight positions and windows
see six, so seven drafts cross the edges of both.

Over several devices, answers and what was accepted of drafts are those of one device, in float32, and nothing
moves between devices but sums of activations, the maxima of logits, and for sampling rows of logits.
"""

from functools import cache
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversations import assert_as_alone, conversation
from memory import is_large
from paged_rows import PagedTarget
from several_devices import answers, run
from tiny_engines import (
    ATTENTION,
    DRAFTERS,
    PAIRS,
    STATES,
    drive_from_python,
    modes_of,
    start_afresh,
    tokens_of,
)

from jaxspec import SamplingParams
from jaxspec.engine.device import oracle
from jaxspec.engine.device.oracle import Oracle
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target

BATCH, WIDTH, VOCABULARY = 3, 32, 48
NEW_TOKENS = 40
# What the loop does and what is split depends on the attention and on the drafter, not on both together.
LOOPS = [pair for pair in PAIRS if pair[0] == "full" or pair[1] in ("eagle3", "gemma4_assistant")]
LOOPS += [("latent", "mtp")]
DRIVEN = [(kind, name) for kind, name in LOOPS if kind not in ("own family", "mamba")]
DRIVEN.remove(("latent", "eagle3"))
"""Those whose loops no other pair has: that family's attention is full, one kind of states is as the other,
and latent attention has MTP."""
# Of two key/value heads, four devices have two copies each, of targets and of EAGLE-3; DFlash and the latent
# kind have four. Other drafters split as these do.
ON = {
    ("full", "ngram"): (2, 4),
    ("full", "eagle3"): (2, 4),
    ("full", "dflash"): (4,),  # and sampled on two
    ("full", "peagle"): (),  # likewise
    ("compressed", "eagle3"): (4,),  # on two is the other drafter
    ("latent", "mtp"): (4,),  # likewise
    ("gemma4", "gemma4_assistant"): (2, 4),
    ("own family", "eagle3"): (),  # its attention is full
}
"""The numbers of devices, for other pairs two."""
SPLIT = [pair for pair in [*LOOPS, ("compressed", "mtp")] if ON.get(pair, (2,))]
SAMPLED = ("eagle3", "eagle3 reference", "peagle", "dflash", "dspark", "near split")


def on_devices(kind):
    """What engines of the pairs of this kind in `SPLIT` do on several devices."""
    asked = [f"{name}@{count}" for of, name in SPLIT if of == kind for count in ON.get((of, name), (2,))]
    if kind == "full":
        asked += ["none@2", "near split@2", "eagle3 coded@2"]
    return run("pairs", kind, "greedy", *asked)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(request, engines_of):
    """Of a module, so that the tests of one pair run after one another."""
    yield request.param
    if is_large():
        engines_of[request.param[0]].close()


@pytest.fixture
def engine(engines_of, pair):
    kind, name = pair
    return engines_of[kind].load(name, DRAFTERS[name], sampling_modes=modes_of(kind, name))


@pytest.fixture(scope="module")
def plain_of(engines_of, prompts):
    """Plain decoding's answers, by the target's kind of attention."""
    return cache(lambda kind: tokens_of(engines_of[kind].load().generate(prompts, max_new_tokens=NEW_TOKENS)))


def answers_and_caches(engine, prompts, *, temperatures):
    """Tokens and acceptance by request, and all caches; requests take the temperatures in turn."""
    start_afresh(engine)
    params = [
        SamplingParams(max_new_tokens=24, temperature=temperatures[i % len(temperatures)], seed=i)
        for i in range(len(prompts))
    ]
    requests = [engine.make_request(*request) for request in zip(prompts, params, strict=True)]
    # All at once, so that each gets the same slot and pages every time.
    engine.submit(requests, lambda request: lambda piece: None)
    assert engine.wait_idle(timeout=250)
    answers = {i: (request.token_ids, request.stats.accepted_at) for i, request in enumerate(requests)}
    caches = jax.tree.leaves((engine.core.state.target_cache, engine.core.state.draft_cache))
    return answers, [np.asarray(cache) for cache in caches]


def assert_same(compiled, host):
    (answers, caches), (host_answers, host_caches) = compiled, host
    assert answers == host_answers
    assert sum(sum(accepted_at) for _, accepted_at in answers.values()) > 0
    for one, other in zip(caches, host_caches, strict=True):
        # Page 0 is nobody's: rows that are not kept may land there in any order. The programs are
        # compiled apart, so XLA may fuse a sum otherwise and round its last bit.
        np.testing.assert_allclose(one[1:], other[1:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("pair", DRIVEN, ids="-".join, indirect=True, scope="module")
def test_the_compiled_loop_drafts_what_the_host_driven_one_does(engine, pair, prompts, monkeypatch):
    """For greedy requests beside sampled ones."""
    compiled = answers_and_caches(engine, prompts, temperatures=[0.0, 1.0])
    ran = drive_from_python(engine, monkeypatch)
    assert_same(compiled, answers_and_caches(engine, prompts, temperatures=[0.0, 1.0]))
    # In the end greedy requests are alone. The least mode that samples serves the others.
    assert set(ran) == set(engine.core.preparation.modes[:2])
    assert len(ran) >= 24 / (DRAFTERS[pair[1]] + 1)


def test_drafting_changes_no_token(engine, pair, prompts, plain_of):
    generations = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
    assert tokens_of(generations) == plain_of(pair[0])
    accepted = sum(generation.stats.accepted for generation in generations)
    drafted = sum(generation.stats.drafted for generation in generations)
    assert 0 < accepted < drafted


def test_a_cached_prefix_changes_no_token(engine, pair, prompts):
    """Nor what a drafter drafts: as much is accepted from cached pages as from its own."""
    start_afresh(engine)
    answers = conversation(engine, prompts)
    # Of answers, no states are kept.
    assert all(answer.cached_tokens >= (16 if pair[0] in STATES else 24) for _, answer in answers[4:])
    assert_as_alone(engine, answers)


def assert_only_meant(moves, count, largest_gather):
    """Sums are of rows as wide as the model, and what is gathered has at most so many numbers."""
    for operation, shapes in moves:
        assert operation in ("all-reduce", "all-gather"), (operation, shapes)
        for shape in shapes:
            if operation == "all-reduce":
                assert shape[-1] == WIDTH, shape
            else:
                assert prod(shape) <= largest_gather, shape


@pytest.mark.parametrize("pair", SPLIT, ids="-".join, indirect=True, scope="module")
def test_several_devices_answer_as_one(engine, pair):
    kind, name = pair
    expected = answers(engine, "greedy")
    for count in ON.get(pair, (2,)):
        result = on_devices(kind)[f"{name}@{count}"]
        assert result["answers"] == expected
        assert result["kernels"]["matmul"] == count
        # An index and a value of every row, from each device.
        assert_only_meant(result["moves"], count, 2 * count * BATCH * (DRAFTERS[name] + 1))


def test_a_cache_in_8_bits_is_split_by_heads(engines_of):
    coded = {"cache_dtype": "float8_e4m3fn", "sampling_modes": ("greedy",)}
    engine = engines_of["full"].load("eagle3", DRAFTERS["eagle3"], **coded)
    result = on_devices("full")["eagle3 coded@2"]
    assert result["answers"] == answers(engine, "greedy")
    assert result["kernels"]["rope_kv_write"] == 2


def test_several_devices_sample_as_one(engines_of):
    results = run("pairs", "full", "sampled", *(f"{name}@2" for name in SAMPLED))
    for name, result in zip(SAMPLED, results.values(), strict=True):
        drafter = name.split()[0]
        engine = engines_of["full"].load(drafter, DRAFTERS[drafter], sampling_modes=modes_of("full", drafter))
        assert result["answers"] == answers(engine, "sampled"), name
        assert result["kernels"]["matmul"] == 2
        assert_only_meant(result["moves"], 2, BATCH * (DRAFTERS[drafter] + 1) * VOCABULARY)
    assert len({str(result["answers"]) for result in results.values()}) > 1


def test_a_layer_is_two_sums_and_a_draw_one_exchange():
    plain, eagle3 = (on_devices("full")[name]["moves"] for name in ("none@2", "eagle3@2"))
    count = [[operation for operation, _ in moves].count for moves in (plain, eagle3)]
    assert [of("all-reduce") for of in count] == [2 * 2, 2 * 2 + 2 + 2]  # the head drafts, and is refreshed
    # The best token and whether its row is finite; the first draft and the loop's.
    assert [of("all-gather") for of in count] == [2, 2 + 2]


def test_heads_fewer_than_devices_are_copied_so_that_attention_is_split():
    two, four = (on_devices("full")[name]["moves"] for name in ("eagle3@2", "eagle3@4"))
    count = [[operation for operation, _ in moves].count("all-reduce") for moves in (two, four)]
    assert count[0] == count[1]


def test_a_small_draft_model_is_whole_on_every_device():
    small, split = (on_devices("full")[name] for name in ("near@2", "near split@2"))
    assert small["answers"] == split["answers"]
    assert len(small["moves"]) < len(split["moves"])
    assert small["split"] < 0.6 < split["split"]


def test_every_kernel_runs_on_shards():
    """XLA cannot split a kernel: one outside of `on_shards` would be given whole caches, if it ran at all."""
    results = [result for kind in {kind for kind, _ in SPLIT} for result in on_devices(kind).values()]
    assert {name for result in results for name in result["kernels"]} == {
        *("matmul", "place_rows", "slot_mapping", "gumbel_sample", "rope_kv_write", "paged_attention"),
        *("latent_write", "latent_attention", "sparse_attention", "choose_entries", "rms_norm"),
        *("argmax", "gumbel_argmax", "random_words", "process_logits", "expert_matmul", "row_max"),
        *("recurrence_step", "recurrence_scan", "sinkhorn", "choose_experts"),
    }


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_cached_prefix_changes_no_token_of_plain_decoding(engines_of, prompts, kind):
    engine = engines_of[kind].load()
    start_afresh(engine)
    assert_as_alone(engine, conversation(engine, prompts))


@pytest.mark.parametrize("kind", ATTENTION)
def test_plain_decoding_takes_the_best_token_of_one_pass_over_the_whole_text(
    engines_of, prompts, plain_of, kind
):
    plain = plain_of(kind)
    model = load_target(open_checkpoint(engines_of[kind].folders["target"]), dtype=jnp.float32)
    width = max(map(len, prompts)) + NEW_TOKENS
    paged = PagedTarget(model, len(prompts), width, page_size=16, width=width)
    texts = [prompt + answer for prompt, answer in zip(prompts, plain, strict=True)]
    logits, _, _ = paged.feed(texts, [0] * len(texts))
    for slot, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
        best = np.asarray(logits[slot, len(prompt) - 1 :].argmax(-1))
        assert answer == best[:NEW_TOKENS].tolist()
        assert len(set(answer)) > 5  # not a loop of one token


def test_an_oracle_without_its_last_draft_step_is_found_out(tiny_engines, prompts, monkeypatch):
    engine = tiny_engines.load("self")  # every draft is accepted
    compiled = answers_and_caches(engine, prompts, temperatures=[0.0])
    call = Oracle.call

    def without_the_last(self, function, *arguments, donated=()):
        if function is oracle._step and int(arguments[-1]) == 2:
            return donated
        return call(self, function, *arguments, donated=donated)

    monkeypatch.setattr(Oracle, "call", without_the_last)
    drive_from_python(engine, monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(compiled, answers_and_caches(engine, prompts, temperatures=[0.0]))
