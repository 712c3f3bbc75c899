"""A tiny model that every test may load: random weights, a word-level tokenizer, a chat template."""

import atexit
import ctypes
import gc
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

# Processes of one run compile a program once, those that tests start included. JAX reads this when imported.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="jaxspec-tests-")
    atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"

import hypothesis
import jax
import pytest
import tokenizers
from memory import is_large

import jaxspec
from jaxspec.engine.programs import Programs

# The tests spend their time on compiling, and these flags cut that to a third. They concern the making of
# machine code, not what XLA makes of a program. XLA dies of a flag that it does not know.
FAST_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # Fewer memory maps per program; see `little_memory`.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if jax.__version_info__ < (0, 11):
    FAST_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILATION])

# The same examples in every run, and none that another left behind; HYPOTHESIS_PROFILE=long draws others.
hypothesis.settings.register_profile(
    "short", derandomize=True, database=None, deadline=None, max_examples=100, print_blob=False
)
hypothesis.settings.register_profile("long", database=None, deadline=None, max_examples=2_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

GOLDENS = Path(__file__).parent / "goldens"
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
    """Processes of `-n auto`: each holds up to 3 GB."""
    return min(os.cpu_count() or 1, 8)


def pytest_collection_finish() -> None:
    """Has the garbage collector leave what was imported alone: tracing makes many small objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the long forms of tests an hour instead of pyproject's limit."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    """Lets go of programs before there is too little memory; past the limit of memory maps LLVM crashes.

    What compiling used goes back to the system after every module: it would take more than the programs.
    """
    yield
    if is_large():
        jax.clear_caches()
    gc.collect()
    with suppress(OSError, AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


COMPILE_BEHIND = Programs.compile_behind


@pytest.fixture(scope="session", autouse=True)
def nothing_is_compiled_behind():
    """What an engine compiles before its first request serves any; the rest takes a third of all time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "compile_behind", lambda programs, sizes: None)
        yield


@pytest.fixture
def compiled_behind(monkeypatch):
    """Engines loaded in this test compile the smaller programs behind its back, as everywhere else."""
    monkeypatch.setattr(Programs, "compile_behind", COMPILE_BEHIND)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory) -> Path:
    """A TOML configuration: the tiny model of at most 128 positions, drafted by n-grams.

    Words are "w6" to "w127", word i being token i, and "user", "assistant" and "system".
    """
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(GOLDENS / "llama-tied" / "checkpoint", folder / "model")
    words = ["<unk>", "<s>", "</s>", "user", "assistant", "system", *(f"w{i}" for i in range(6, 128))]
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
    """The engine of `tiny_config`, shared: leave nothing running in it."""
    return jaxspec.load(tiny_config, progress=False)
