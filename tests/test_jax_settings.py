"""The same tokens, losses and reports, whatever settings of JAX the program around the package has made.

A new setting is a line of `SETTINGS` or of `CONTEXTS`. All of them are made at once, because loading an
engine under each would take minutes; `test_a_setting_is_ours_inside` tells them apart.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src import config as jax_config
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType
from tiny_engines import SIZES
from tiny_models import write_eagle3, write_target

import jaxspec
from jaxspec.config import ModelConfig
from jaxspec.files import open_checkpoint
from jaxspec.jax_settings import own_settings
from jaxspec.lab.training.config import HeadConfig, TrainConfig
from jaxspec.lab.training.head import head_config, new_head
from jaxspec.lab.training.trainer import Trainer
from jaxspec.models.families.llama import Llama
from jaxspec.models.target import plan_target
from jaxspec.weights import loading

SETTINGS = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "bfloat16",
    "jax_allow_f16_reductions": False,
    "jax_explicit_x64_dtypes": "error",
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_random_seed_offset": 5,
    "jax_enable_custom_prng": True,
    "jax_legacy_prng_key": "error",
    "jax_debug_key_reuse": True,
    "jax_high_dynamic_range_gumbel": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
    "jax_check_static_indices": True,
    "jax_error_checking_behavior_nan": "raise",
    "jax_error_checking_behavior_divide": "raise",
    "jax_error_checking_behavior_oob": "raise",
    "jax_pallas_enable_debug_checks": True,
    "jax_pallas_poison_buffers": True,
    "jax_captured_constants_warn_bytes": 1,
    "jax_transfer_guard_host_to_device": "disallow_explicit",
    "jax_transfer_guard_device_to_device": "disallow_explicit",
    "jax_transfer_guard_device_to_host": "disallow_explicit",
    "jax_raise_persistent_cache_errors": True,
    "jax_disable_jit": True,
    "jax_no_tracing": True,
    "jax_no_execution": True,
    "jax_softmax_custom_jvp": True,
    "jax_optimization_level": "O0",
    "jax_memory_fitting_level": "O0",
    "jax_exec_time_optimization_effort": -1.0,
    "jax_memory_fitting_effort": 1.0,
    "jax_enable_pgle": True,
    "jax_scan3": True,
    "jax_remat3": True,
    "jax_custom_vjp3": True,
}
CONTEXTS = {
    "set_mesh": lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))),
    "set_xla_metadata": lambda: set_xla_metadata(a="b"),
    "errstate": lambda: np.errstate(all="raise"),
}
KNOWN = [name for name in SETTINGS if name in jax_config.config_states]
GUARDS = [name for name in KNOWN if "transfer_guard" in name]
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9]]
SAMPLED = {"temperature": 1.0, "top_k": 20, "seed": 3}
TESTS = Path(__file__).parent


@contextmanager
def in_config(*names):
    """Makes the settings with `jax.config.update`, for all threads."""
    states = {name: jax_config.config_states[name] for name in names}
    before = {name: state.get_global() for name, state in states.items()}
    try:
        for name in names:
            jax.config.update(name, SETTINGS[name])
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextmanager
def in_context(*names):
    """Makes the settings with context managers, for this thread; all `CONTEXTS` too."""
    with ExitStack() as stack:
        for make in CONTEXTS.values():
            stack.enter_context(make())
        for name in names:
            stack.enter_context(jax_config.config_states[name](SETTINGS[name]))
        yield


def environment():
    """The settings as variables; `JAX_TRANSFER_GUARD` sets all three guards."""
    made = {name.upper(): str(SETTINGS[name]) for name in KNOWN if name != "jax_no_tracing"}
    return {**os.environ, **made, "JAX_TRANSFER_GUARD": "disallow"}


FORMS = pytest.mark.parametrize("made", [in_config, in_context])


def load(folder, **options):
    drafter = {"kind": "eagle3", "source": str(folder / "eagle3"), "num_speculative_tokens": 2}
    return jaxspec.load(folder / "target", drafter=drafter, progress=False, **{**SIZES, **options})


def answers(engine):
    """Greedy and sampled tokens, and those of every step of an inspected answer."""
    engine.forget_prefixes()
    found = [engine.generate(PROMPTS, max_new_tokens=12, **sampling) for sampling in ({}, SAMPLED)]
    steps = jaxspec.inspect_steps(engine, PROMPTS[0], max_new_tokens=6).steps
    assert all(step.target_probabilities.dtype == np.float32 for step in steps)
    return [each.token_ids for several in found for each in several], [step.tokens for step in steps]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_eagle3(folder / "eagle3", write_target(folder / "target"))
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with load(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine):
    return answers(engine)


def value(name):
    return jax_config.config_states[name].value


@FORMS
@pytest.mark.parametrize("name", KNOWN)
def test_a_setting_is_ours_inside(name, made):
    with own_settings():
        ours = value(name)
    with made(name):
        users = value(name)
        assert users != ours
        with own_settings():
            assert value(name) == ours
        assert value(name) == users


def test_what_checks_for_nan_is_the_users_again_afterwards():
    divide, zeros = jax.jit(lambda x: x / x), jnp.zeros(2)

    def check():
        divide(zeros + 1)  # what is compiled is checked elsewhere than what is not
        with own_settings():
            assert jnp.isnan(divide(zeros)).all()
        with pytest.raises(FloatingPointError):
            divide(zeros)

    # JAX's own context manager, once left, turns the check off for its thread: this needs a new one.
    with in_config("jax_debug_nans"), ThreadPoolExecutor(1) as thread:
        thread.submit(check).result()


def test_a_mesh_is_the_users_again_afterwards():
    with CONTEXTS["set_mesh"]():
        mesh = jax.sharding.get_abstract_mesh()
        with own_settings():
            assert jax.sharding.get_abstract_mesh().empty
        assert jax.sharding.get_abstract_mesh() == mesh


@FORMS
def test_an_engine_loaded_before_answers_the_same(made, engine, expected):
    with made(*KNOWN):
        assert answers(engine) == expected


@FORMS
def test_an_engine_loaded_under_the_settings_answers_the_same(made, folder, expected):
    with made(*KNOWN), load(folder) as engine:
        assert answers(engine) == expected
    with load(folder) as engine:  # nothing is left of them
        assert answers(engine) == expected


def test_settings_of_the_environment(folder, expected):
    """An engine in a process that never had others."""
    program = (
        "import json, sys, pathlib, test_jax_settings as t\n"
        "with t.load(pathlib.Path(sys.argv[1])) as engine: print(json.dumps(t.answers(engine)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=TESTS,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(expected)


def test_threads_that_pack_weights_have_them(folder, monkeypatch):
    """They look into weights that are packed already, such as the rows of a head that are the target's."""
    seen = []

    def look(source, shape, dtype, stored, **how):
        seen.append([value(name) for name in GUARDS])
        assert threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr(loading, "stored_weight", look)
    plan = plan_target(open_checkpoint(folder / "target"), dtype=jnp.dtype("float32"))
    with in_config(*KNOWN), own_settings():
        plan.read(packed=True)
    assert len(seen) > 9
    assert {guard for guards in seen for guard in guards} == {"allow"}


def test_programs_that_compile_later_do(folder, expected, compiled_behind, caplog):
    caplog.set_level(logging.WARNING, "jaxspec")
    with load(folder, slot_sizes=(1, 2)) as engine, in_config(*KNOWN):
        engine.programs.wait_compiled()
        assert answers(engine) == expected
        assert len(engine.programs.compiled) > 4
    assert not caplog.records


def test_a_round_that_fails_is_made_good(engine, expected, monkeypatch):
    """The new state is allocated in the engine's thread."""
    enqueue, failing = engine.programs.enqueue, threading.Event()

    def fails_once(*args, **kwargs):
        if not failing.is_set():
            failing.set()
            raise RuntimeError("once")
        return enqueue(*args, **kwargs)

    monkeypatch.setattr(engine.programs, "enqueue", fails_once)
    with in_config(*KNOWN):
        assert answers(engine) == expected
    assert failing.is_set()


@FORMS
def test_losslessness_is_checked_under_the_settings(made, folder):
    with made(*KNOWN):
        report = jaxspec.check_lossless(
            {"kind": "draft_model", "source": str(folder / "target"), "num_speculative_tokens": 2},
            folder / "target",
            max_new_tokens=8,
            samples=20,
            **SIZES,
        )
    assert not report.differences


@pytest.fixture(scope="module")
def loss_of():
    """Trains a head for an update; returns losses and a trained parameter, which depend on initial draws."""
    shape = ModelConfig("llama", 40, 16, 24, 5, 2, 1, 8, tie_word_embeddings=True)
    target = Llama(shape, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 40, (2, 16)),
        "positions": np.tile(np.arange(16), (2, 1)),
        "segments": np.ones((2, 16), int),
        "answer": np.arange(16) > np.array([[3], [2]]),
    }
    config = TrainConfig(steps=4, batch_size=2, row_length=16, warmup_steps=0, num_unroll_steps=2)

    def train():
        head = new_head(
            head_config(HeadConfig(), shape, 20),
            target,
            np.arange(0, 40, 2),
            num_speculative_tokens=2,
            seed=1,
        )
        trainer = Trainer(head, target, config)
        rows = trainer.put(batch)
        state, sums = trainer.update(trainer.initial_state(), rows)
        validated = trainer.validate(state, rows)
        kernel = trainer.head(trainer.averaged(state, trainer.initial_state().params, 0.5)).fc.kernel
        return [sums.loss, validated.loss, kernel[...]]

    return train


@pytest.fixture(scope="module")
def plain_losses(loss_of):
    return loss_of()


@FORMS
def test_training_is_the_same(made, loss_of, plain_losses):
    with made(*KNOWN):
        found = loss_of()
    for one, two in zip(plain_losses, found, strict=True):
        assert two.dtype == one.dtype
        np.testing.assert_array_equal(one, two)


def test_numpys_errors_are_those_of_a_new_thread():
    with np.errstate(all="raise"), own_settings(), pytest.warns(RuntimeWarning, match="overflow"):
        assert np.isinf(np.float32(1e38) * np.float32(10))
