"""A tiny model for all tests: random weights, a word-level tokenizer and a chat template."""

import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compiled import compiled_folder

# All processes of a run, including those that tests start, share compiled programs. JAX reads this on import.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiled_folder())
    # Writing small programs takes longer than compiling them again.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"

import hypothesis
import jax
import pytest
import tiers
import tokenizers
from memory import collect_seldom, give_back, is_large
from programs_when_run import compile_ahead, compile_when_run

import jaxspec
from jaxspec.config import EngineConfig
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.rounds import core

# On a CPU, tests spend most of their time compiling, which these flags cut to a third. They affect code
# generation by LLVM, not XLA's optimisation of programs. XLA ends the process over a flag that it does not
# know.
FAST_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # Fewer memory maps per program; see `little_memory`.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):
    FAST_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")
ON_GPU = os.environ.get("JAX_PLATFORMS") != "cpu" and any(
    map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))
)
if not ON_GPU:
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILATION])

# The same examples in every run, without a database of failures; HYPOTHESIS_PROFILE=long draws others.
hypothesis.settings.register_profile(
    "short", derandomize=True, database=None, deadline=None, max_examples=100, print_blob=False
)
hypothesis.settings.register_profile("long", database=None, deadline=None, max_examples=2_000)
# faults/run.py wants to know that a test fails, not the smallest example that it fails with.
hypothesis.settings.register_profile(
    "fault",
    parent=hypothesis.settings.get_profile("short"),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

# A shell's background job ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDENS = Path(__file__).parent / "goldens"
# Folders whose quick tests are also run on a GPU (scripts/check_gpu.py); tests of kernels name theirs.
FOR_GPUS = ("attention/", "drafters/", "engine/", "lab/training/", "sampling/")
# Files that start first: those that need more than a gigabyte, while a process is small, and those that take
# 20 seconds or more, the longest first.
FIRST = [
    "engine/test_real_greedy_equality.py",
    "models/test_real_target.py",
    "models/test_real_gemma3.py",
    "test_default_configuration.py",
    "engine/test_pairs.py",
    "engine/test_grammars.py",
    "engine/test_program_sizes.py",
    "service/batch/test_batch_ray.py",
    "models/test_deepseek_v4.py",
    "engine/test_several_devices.py",
    "engine/test_distribution.py",
    "lab/training/test_adapter.py",
    "engine/test_adaptive_k.py",
    "lab/training/test_every_family.py",
    "notebooks/test_notebooks.py",
    "lab/training/test_pipeline.py",
    "drafters/test_eagle.py",
    "engine/test_scores.py",
    "lab/training/test_command.py",
    "sampling/test_losslessness.py",
    "kernels/test_int8_matmul.py",
    "engine/test_weights.py",
    "engine/test_constraints.py",
    "engine/test_states.py",
    "engine/test_greedy_equality.py",
    "test_jax_settings.py",
    "grammar/test_grammar_texts.py",
    "attention/test_row_blocks.py",
    "test_fuzz_config.py",
    "kernels/test_linear_recurrence.py",
    "engine/test_fresh_metadata.py",
    "kernels/test_packed_weight.py",
]
# Files of `engine` that use the same engines: one process runs them, and compiles each engine once.
TOGETHER = [
    {"greedy_equality", "poison", "drafter_state", "prefixes", "inspection", "lifecycle", "generation"}
    | {"sampling_modes", "clients", "counters"},
    {"program_sizes", "invariance"},
    {"adaptive_k", "soak"},
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
CONFIG = """
[target]
source = "model"

[drafter]
kind = "ngram"
num_speculative_tokens = 3

[engine]
batch_size = 4
page_size = 8
prefill_chunk = 16
slot_sizes = []
"""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of processes of `-n auto`, each of which needs up to 3 GB."""
    return min(os.cpu_count() or 1, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with files that share engines as one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            name = file.removeprefix("tests/engine/test_").removesuffix(".py")
            return next((" ".join(sorted(names)) for names in TOGETHER if name in names), file)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    collect_seldom()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what tiers.py leaves to `.ci/run`. Puts the files of `FIRST` first, so that no process is left
    alone with one at the end, and gives slow tests an hour instead of the limit in pyproject.toml."""
    tests = [
        (item.path.relative_to(tiers.TESTS).as_posix(), item.nodeid.partition("::")[2]) for item in items
    ]
    is_whole = config.stash[tiers.COLLECTED] = dict(zip(tests, tiers.whole(tests), strict=True))
    for item, test in zip(items, tests, strict=True):
        if is_whole[test]:
            item.add_marker(pytest.mark.whole)
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))
        if item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skipif(ON_GPU, reason="is about engines on a CPU"))
        elif test[0].startswith(FOR_GPUS) and not is_whole[test]:
            item.add_marker(pytest.mark.gpu)
    places = {tiers.TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """Frees programs if the process is large; near the limit of memory maps LLVM crashes."""
    yield
    if is_large():
        jax.clear_caches()
        give_back()


COMPILE_IN_BACKGROUND = Programs.compile_in_background


@pytest.fixture(scope="session", autouse=True)
def only_what_runs_is_compiled():
    """Programs are compiled when they first run, and none in the background: tests spend most of their time
    compiling, the first programs serve any request, and of these a test runs about half."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "compile", compile_when_run)
        patch.setattr(Programs, "compile_in_background", lambda programs, sizes: None)
        patch.setattr(core, "_needs_warming", lambda: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def float32_unless_exact():
    """Engines compute in float32 by default, also on a GPU, since goldens are in float32."""
    with pytest.MonkeyPatch.context() as patch:
        if ON_GPU:
            usual = EngineConfig.dtype_on
            patch.setattr(
                EngineConfig,
                "dtype_on",
                lambda config, backend: usual(config, backend if config.exact else "cpu"),
            )
        yield


@pytest.fixture
def compiled_ahead(monkeypatch):
    """Engines compile their programs before they run, as outside of the tests."""
    monkeypatch.setattr(Programs, "compile", compile_ahead)


@pytest.fixture
def compiled_behind(monkeypatch):
    """Engines loaded in this test compile smaller programs in the background, as outside of the tests."""
    monkeypatch.setattr(Programs, "compile_in_background", COMPILE_IN_BACKGROUND)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Path:
    """A TOML configuration: the tiny model with at most 128 positions, drafted by n-grams.

    Its words are "w6" to "w126" (word wi is token i), "null", "user", "assistant" and "system".
    """
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(GOLDENS / "llama-tied" / "checkpoint", folder / "model")
    words = ["<unk>", "<s>", "</s>", "user", "assistant", "system", *(f"w{i}" for i in range(6, 127)), "null"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "model" / "tokenizer.json"))
    tokenizer_config = {"eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), "utf-8")
    (folder / "tiny.toml").write_text(CONFIG, "utf-8")
    return folder / "tiny.toml"


@pytest.fixture(scope="session")
def tiny_engine(tiny_config) -> jaxspec.Engine:
    """The shared engine of `tiny_config`; tests must leave it idle."""
    return jaxspec.load(tiny_config, progress=False)


@pytest.fixture
def compiled():
    """What JAX compiles during a test."""
    events = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
