"""A head that is adapted to what its engine generates follows a policy that moves."""

import threading
from contextlib import ExitStack
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from programs_when_run import compile_now
from tiny_engines import SIZES, assert_idle, tokens_of
from tiny_models import write_eagle3, write_target
from tiny_mtp import LATENT, write_with_mtp

import jaxspec
from jaxspec import AcceptanceStats, ConfigError, EngineError
from jaxspec.engine.api.samples import Samples
from jaxspec.lab.training import adapt
from jaxspec.lab.training.adapter import _HEADS, Adaptation, _TrainedHead
from jaxspec.lab.training.loss import StepSums
from jaxspec.weights.array_weights import flatten

VOCABULARY = 24
LEARN = {"epochs": 2, "batch_tokens": 256, "learning_rate": 3e-2}
ASK = {"max_new_tokens": 32, "temperature": 1.0}
RNG = np.random.default_rng(0)
PROMPTS, HELD_OUT = (RNG.integers(0, VOCABULARY, (count, 4)).tolist() for count in (24, 24))


def load(root, kind):
    """An engine whose target knows what it wants, and whose head has random weights."""
    target = write_target(
        root / "target", gain=0.8, vocab_size=VOCABULARY, **(LATENT if kind == "mtp" else {})
    )
    if kind == "mtp":
        target, own = write_with_mtp(root / "head", target), {}
    else:
        head = write_eagle3(root / "head", target, draft_vocab_size=20, repeats=False)
        own = {"source": str(head)}
    drafter = {"kind": kind, "num_speculative_tokens": 2, **own}
    engine = jaxspec.load(target, drafter=drafter, progress=False, **{**SIZES, "batch_size": 8})
    weights = nnx.to_pure_dict(engine.weights)
    weights["norm"]["scale"] *= 4
    engine.update_weights(weights)
    return engine


def arrays_of(module):
    return {path: np.array(value) for path, value in flatten(nnx.state(module)).items()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """By the kind of head, an engine and the weights of its target and its head before any test."""
    with ExitStack() as stack:

        @cache
        def of(kind):
            engine = stack.enter_context(load(tmp_path_factory.mktemp("adapter"), kind))
            return engine, arrays_of(engine.target), arrays_of(engine.drafter)

        yield of


@pytest.fixture
def eagle3(engines):
    return engines("eagle3")[0]


@pytest.fixture(params=["eagle3", "mtp"])
def untrained(engines, request):
    """An engine as it was loaded."""
    engine, target, head = engines(request.param)
    _HEADS.pop(engine.programs, None)
    engine.update_weights(target, drafter=head)
    yield engine
    assert_idle(engine)


def acceptance(engine):
    return AcceptanceStats.total(engine.generate(HELD_OUT, seed=1, **ASK)).acceptance_length


def rounds(engine, count, seed):
    for i in range(count):
        adapt(engine, engine.generate(PROMPTS, seed=seed + i, **ASK), **LEARN)


def move(engine, scale):
    """Moves the policy, by noise on every matrix."""
    rng = np.random.default_rng(5)

    def moved(weight):
        noise = scale * float(weight.std()) * rng.normal(size=weight.shape)
        return weight + noise.astype(np.float32) if weight.ndim > 1 else weight

    engine.update_weights(jax.tree.map(moved, nnx.to_pure_dict(engine.weights)))


def test_acceptance_recovers_after_the_policy_has_moved(untrained):
    engine = untrained
    at_first = acceptance(engine)
    rounds(engine, 6, seed=10)
    before = acceptance(engine)
    move(engine, 0.5)
    fallen = acceptance(engine)
    greedy = tokens_of(engine.generate(HELD_OUT[:4], max_new_tokens=16))
    rounds(engine, 10, seed=20)
    recovered = acceptance(engine)
    assert before > 1.12 * at_first
    assert fallen < 0.93 * before
    assert recovered > 0.95 * before
    assert tokens_of(engine.generate(HELD_OUT[:4], max_new_tokens=16)) == greedy


def test_a_second_call_goes_on_and_compiles_nothing(eagle3, compiled):
    _HEADS.pop(eagle3.programs, None)
    answers = eagle3.generate(PROMPTS[:6], seed=3, **ASK)
    first = adapt(eagle3, answers, **{**LEARN, "epochs": 1})
    assert first.updates == 1
    assert first.tokens == sum(len(answer.token_ids) for answer in answers)
    assert (len(first.overlap), len(first.accuracy)) == (2, 2)
    assert first.weights_version == eagle3.weights_version
    compile_now(eagle3.programs)
    before = len(compiled)
    # Longer and shorter ones, in lists.
    longer = eagle3.generate(PROMPTS[:6], temperature=1.0, seed=4, n=3, max_new_tokens=40)
    second = adapt(eagle3, [longer], **LEARN)
    assert compiled[before:] == []
    assert int(_HEADS[eagle3.programs].state.step) == 1 + second.updates
    assert second.weights_version == first.weights_version + 1


def test_updates_add_up(eagle3):
    answers = eagle3.generate(PROMPTS[:6], seed=3, **ASK)
    adapt(eagle3, answers, **{**LEARN, "epochs": 10})  # of which each may change more than the one before
    moved = []
    for epochs in (1, 8):
        before = eagle3.drafter.fc.kernel[...].copy()
        assert adapt(eagle3, answers, **{**LEARN, "epochs": epochs}).updates == epochs
        moved.append(float(np.abs(eagle3.drafter.fc.kernel[...] - before).mean()))
    assert moved[1] > 2 * moved[0] > 0


def test_requests_run_meanwhile(eagle3):
    answers = eagle3.generate(PROMPTS, seed=3, **ASK)
    (expected,) = tokens_of(eagle3.generate(HELD_OUT[:1], max_new_tokens=32))
    ended, is_over = [], threading.Event()

    def ask():
        while not is_over.is_set():
            ended.append(eagle3.generate(HELD_OUT[0], max_new_tokens=32))

    asking = threading.Thread(target=ask)
    asking.start()
    versions = [adapt(eagle3, answers, **LEARN).weights_version for _ in range(2)]
    is_over.set()
    asking.join()
    assert {tuple(answer.token_ids) for answer in ended} == {tuple(expected)}
    assert {answer.weights_version for answer in ended} <= {versions[0] - 1, *versions}


def test_what_others_put_in_its_place_is_what_is_adapted(eagle3):
    answers = eagle3.generate(PROMPTS[:4], seed=3, **ASK)
    adapt(eagle3, answers, **LEARN)
    others = {
        path: 0.9 * value if value.dtype == np.float32 else value
        for path, value in arrays_of(eagle3.drafter).items()
    }
    eagle3.update_weights(drafter=others)
    adapt(eagle3, answers, **{**LEARN, "learning_rate": 1e-9})
    for path, value in arrays_of(eagle3.drafter).items():
        np.testing.assert_allclose(value, others[path], atol=1e-6)


def test_every_option_arrives(eagle3, monkeypatch):
    seen = []

    def update(self, engine, batch, config):
        seen.append((batch["tokens"].shape, config.learning_rate))
        return StepSums(*np.ones((4, 2), np.float32))

    def put(self, engine, in_flight):
        seen.append(in_flight)
        return 7

    monkeypatch.setattr(_TrainedHead, "update", update)
    monkeypatch.setattr(_TrainedHead, "put", put)
    answers = eagle3.generate(PROMPTS[:24], max_new_tokens=24)  # 28 tokens each, with their prompts
    asked = {"epochs": 2, "learning_rate": 3e-3, "batch_tokens": 512, "in_flight": "abort"}
    assert adapt(eagle3, answers, **asked) == Adaptation(4, 24 * 24, [1.0, 1.0], [1.0, 1.0], 7)
    assert seen == [((1, 512), 3e-3)] * 4 + ["abort"]
    del seen[:]
    adapt(eagle3, Samples(*[np.zeros(0)] * 5, weights_version=0, generations=answers[:3]), batch_tokens=100)
    assert seen == [((1, 128), 1e-3), "finish"]


def test_what_cannot_be_done_is_one_line_and_changes_nothing(eagle3, tmp_path):
    answers = eagle3.generate(PROMPTS, seed=3, **ASK)
    before = arrays_of(eagle3.drafter)
    short = eagle3.generate(PROMPTS[:2], max_new_tokens=1)
    with pytest.raises(ValueError, match=r"^adapt: no answer has two tokens"):
        adapt(eagle3, short)
    with pytest.raises(ValueError, match=r"^adapt: expected answers of the engine, got int$"):
        adapt(eagle3, [3])
    with pytest.raises(ConfigError, match=r"^epochs must be a whole number of at least 1, got 0$"):
        adapt(eagle3, answers, epochs=0)
    with pytest.raises(
        ValueError, match=r"^adapt: the loss is not finite; learning_rate 1e\+38 may be too high$"
    ):
        adapt(eagle3, answers, **{**LEARN, "learning_rate": 1e38})
    after = arrays_of(eagle3.drafter)
    assert all(np.array_equal(after[path], value) for path, value in before.items())
    assert np.isfinite(adapt(eagle3, answers, **LEARN).overlap).all()
    other = jaxspec.load(write_target(tmp_path / "target"), drafter="ngram", progress=False, **SIZES)
    with other, pytest.raises(ValueError, match=r"class NGramDrafter cannot.* eagle1, eagle3, mtp can$"):
        adapt(other, answers)
    with pytest.raises(EngineError, match="closed"):
        adapt(other, answers)
