"""The public functions: their results, and bad input rejected in one line before anything is allocated."""

import json
import shutil
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import write_eagle1, write_eagle3, write_target

import jaxspec
from jaxspec.config import Config, DrafterConfig, SourceConfig, load_config, resolve_config
from jaxspec.drafters.formats import drafter_keys
from jaxspec.weights.loading import ModulePlan

SIZES = {"batch_size": 2, "max_model_len": 32, "page_size": 8, "prefill_chunk": 8, "slot_sizes": ()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("api")
    target = write_target(root / "target")
    wide = write_target(root / "wide", hidden_size=64)
    return {
        "target": target,
        "eagle3": write_eagle3(root / "eagle3", target),
        "eagle3 of another": write_eagle3(root / "wide_eagle3", wide),
        "eagle1 of another": write_eagle1(root / "wide_eagle1", wide),
    }


@pytest.fixture(scope="module")
def engine(folders):
    return jaxspec.load(folders["target"], sampling_modes=("greedy",), progress=False, num_pages=3, **SIZES)


@pytest.fixture
def nothing_allocated(monkeypatch):
    """No weight is read and no cache is made."""

    def allocate(*args, **kwargs):
        raise AssertionError("allocated before the input was checked")

    monkeypatch.setattr(ModulePlan, "read", allocate)
    monkeypatch.setattr("jaxspec.engine.rounds.core.init_state", allocate)


def refused(call: Callable, *args, **kwargs) -> str:
    """The one-line message of the ValueError that a call raises."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_alone_is_drafted_for_by_prompt_lookup(folders, engine):
    assert resolve_config(folders["target"]).drafter == DrafterConfig("ngram")
    assert engine.num_speculative_tokens == DrafterConfig("ngram").num_drafts
    generation = jaxspec.generate([1, 2, 3], folders["target"], max_new_tokens=5, progress=False)
    assert isinstance(generation, jaxspec.Generation)
    assert len(generation.token_ids) == 5
    assert generation.prompt_token_ids == [1, 2, 3]
    assert generation.finish_reason == "length"
    assert generation.text == ""
    assert (generation.stats.steps, generation.stats.drafted) == (4, 0)


def test_an_engine_says_what_it_is(folders, engine):
    assert repr(engine) == "<Engine: Llama, NGramDrafter with K 4, 2 x 32 positions, float32>"
    drafter = {"kind": "ngram", "num_speculative_tokens": "auto"}
    sizes = {"sampling_modes": ("greedy",), "progress": False, **SIZES}
    with jaxspec.load(folders["target"], drafter=drafter, **sizes) as drafting:
        assert repr(drafting).startswith("<Engine: Llama, NGramDrafter with K up to ")
        assert "closed" not in repr(drafting)
    assert repr(drafting).endswith(" 2 x 32 positions, float32, closed>")
    with jaxspec.load(folders["target"], drafter="none", **sizes) as plain:
        assert repr(plain) == "<Engine: Llama, no drafts, 2 x 32 positions, float32>"


def test_one_prompt_gives_one_generation_and_several_give_a_list(engine):
    prompt = [1, 2, 3]
    one = engine.generate(prompt, max_new_tokens=4)
    for several in ([prompt, [4]], (prompt, [4]), [np.array(prompt), np.array([4])]):
        generations = engine.generate(several, max_new_tokens=4)
        assert [generation.prompt_token_ids for generation in generations] == [prompt, [4]]
        assert generations[0].token_ids == one.token_ids
    assert engine.generate(np.array(prompt), max_new_tokens=4).token_ids == one.token_ids
    assert [g.token_ids for g in engine.generate([prompt], max_new_tokens=4)] == [one.token_ids]
    assert engine.generate([], max_new_tokens=4) == []


def test_parameters_come_in_one_object_or_as_keywords(engine):
    params = jaxspec.SamplingParams(max_new_tokens=3)
    assert engine.generate([1], params).token_ids == engine.generate([1], max_new_tokens=3).token_ids
    assert "give top_p in params or as a keyword" in refused(engine.generate, [1], params, top_p=0.5)


def test_generate_takes_parameters_in_one_object_too(folders, engine):
    params = jaxspec.SamplingParams(max_new_tokens=3)
    sizes = {"max_model_len": 32, "prefill_chunk": 8, "page_size": 8}
    answer = jaxspec.generate([1], folders["target"], params=params, progress=False, engine=sizes)
    assert answer.token_ids == engine.generate([1], params).token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batchsize": 1}, "unknown key engine.batchsize; did you mean 'batch_size'? known: batch_size"),
        ({"batch_size": 0}, "engine.batch_size must be a whole number of at least 1, got 0"),
        ({"max_model_len": 129}, "engine.max_model_len 129 is past the model's limit of 128"),
        ({"tensor_parallel": 64}, "engine.tensor_parallel is 64"),
        (
            {"sampling_modes": ("fast",)},
            "sampling_modes must be some of ['greedy', 'sampled'], got ('fast',)",
        ),
        ({"sampling_modes": "greedy"}, "sampling_modes must be some of"),
        ({"sampling_modes": ()}, "sampling_modes must be some of"),
        ({"drafter": 4}, "drafter must be a name, keys of [drafter], a DrafterConfig or a Drafter, got 4"),
        ({"drafter": "eagle"}, "drafter: 'eagle' is not a configuration, file, folder or Hub id (org/name)"),
        ({"drafter": "eagel3"}, "; did you mean 'eagle3'? known: ngram, eagle3"),
        ({"drafter": "eagle"}, "docs/writing-a-drafter.md"),
        ({"drafter": {"kind": "eagle"}}, "docs/writing-a-drafter.md"),
        ({"drafter": "eagle3"}, "drafter.source is missing: 'eagle3' needs a checkpoint"),
        ({"drafter": {"type": "ngram"}}, "unknown key drafter.type; did you mean 'kind'? known: kind"),
        (
            {"drafter": {"kind": "eagle"}},
            "drafter.kind 'eagle' is unknown; did you mean 'eagle3'? known: ",
        ),
        ({"drafter": {"kind": "eagle3"}}, "drafter.source is missing: 'eagle3' needs a checkpoint"),
        ({"drafter": {"kind": "eagle3", "source": "no/such/head"}}, "no/such/head: no such file or folder"),
        (
            {"drafter": "none", "synthetic_acceptance_length": 1.5},
            "synthetic_acceptance_length 1.5 is past 1",
        ),
        (
            {"drafter": {"kind": "ngram"}, "synthetic_acceptance_length": 6.0},
            "synthetic_acceptance_length 6.0 is past 5, which 4 drafts per step can reach",
        ),
    ],
)
def test_bad_settings(folders, nothing_allocated, settings, message):
    assert message in refused(jaxspec.load, folders["target"], progress=False, **settings)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("eagle3", "eagle3 of another", "the head is for targets of hidden size 64, this one has 32"),
        ("eagle1", "eagle1 of another", "the head has hidden_size 64, the target 32"),
        ("eagle3", "target", "target is a whole model: use kind 'draft_model'"),
        ("eagle1", "eagle3", "eagle3 is an EAGLE-3 head: use kind 'eagle3'"),
    ],
)
def test_heads_that_do_not_fit(folders, nothing_allocated, kind, name, message):
    drafter = {"kind": kind, "source": str(folders[name])}
    assert message in refused(jaxspec.load, folders["target"], drafter=drafter, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "'model.norm.weight' is missing"),
        ({"model.norm.weight": np.ones(31, np.float32)}, "has shape [31], expected [32]"),
        ({"model.norm.bias": np.ones(32, np.float32)}, "spare tensor 'model.norm.bias'"),
    ],
)
def test_targets_with_other_tensors(folders, tmp_path, nothing_allocated, change, message):
    folder = tmp_path / "target"
    shutil.copytree(folders["target"], folder)
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    drafter = {"kind": "eagle3", "source": str(folders["eagle3"])}
    assert message in refused(jaxspec.load, folder, drafter=drafter, progress=False)


def test_models_that_are_not_there_or_not_supported(folders, tmp_path, nothing_allocated):
    assert "; did you mean 'smollm2-135m'? known: " in refused(jaxspec.load, "smollm2", progress=False)
    assert "nothing: no such file or folder" in refused(jaxspec.load, tmp_path / "nothing", progress=False)
    assert "no such file or folder" in refused(jaxspec.load, tmp_path / "nothing.toml", progress=False)
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused(jaxspec.load, tmp_path / "empty", progress=False)
    shutil.copytree(folders["target"], tmp_path / "gpt")
    config = json.loads((tmp_path / "gpt" / "config.json").read_text("utf-8"))
    (tmp_path / "gpt" / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}), "utf-8")
    assert "model_type 'gpt2' is not supported" in refused(jaxspec.load, tmp_path / "gpt", progress=False)
    (tmp_path / "foreign.gguf").write_bytes(b"GGML" + bytes(100))
    assert "foreign.gguf" in refused(jaxspec.load, tmp_path / "foreign.gguf", progress=False)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "prompt is empty"),
        ([[1], []], "prompt is empty"),
        ([1, 48], "token id 48 is outside the vocabulary of 48"),
        ([1, -1], "token id -1 is outside the vocabulary of 48"),
        ([1, 2**70], f"token id {2**70} is outside the vocabulary of 48"),
        ([1] * 32, "prompt of 32 tokens leaves no room to answer: max_model_len is 32"),
        ([1] * 23, None),
        ("hello", "text needs a tokenizer, and this checkpoint has none; pass token ids"),
        ([{"role": "user", "content": "hello"}], "chat messages need a chat template"),
        ({"role": "user", "content": "hello"}, "prompt must be a string, a list of token ids"),
        ([1, 2.5], "prompt must be a string, a list of token ids or a list of chat messages"),
        ([True, False], "prompt must be a string, a list of token ids or a list of chat messages"),
        ([[1], None], "prompt must be a string"),
        ([[1], 2], "prompt must be a string"),
        (None, "prompt must be a string"),
        (5, "prompt must be a string"),
        (np.array(5), "prompt must be a string"),
        (b"\x01\x02", "prompt must be a string"),
        ([[1], b"\x01\x02"], "prompt must be a string"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_runs(engine, monkeypatch, prompts, message):
    if message is None:
        assert len(engine.generate(prompts, max_new_tokens=1).token_ids) == 1
        return
    monkeypatch.setattr(engine, "submit", lambda *args: pytest.fail("ran"))
    assert message in refused(engine.generate, prompts, max_new_tokens=1)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 0.5}, "temperature: this engine was loaded for greedy decoding only"),
        ({"temperature": -1}, "temperature must be a number, 0 or more, got -1"),
        ({"top_p": 0}, "top_p must be a number, above 0 and at most 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer, 1 or more, got 0"),
        ({"stop": "end"}, "stop strings need a tokenizer, and this checkpoint has none"),
        ({"stop_token_ids": [48]}, "stop_token_ids: 48 is outside the vocabulary of 48"),
        ({"stop_token_ids": [2**40]}, f"stop_token_ids: {2**40} is outside the vocabulary of 48"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids: at most 16 with the model's own, got 17"),
        ({"max_new_tokens": 25}, "raise engine.num_pages"),
    ],
)
def test_bad_sampling_parameters_are_refused_and_nothing_runs(engine, monkeypatch, sampling, message):
    monkeypatch.setattr(engine, "submit", lambda *args: pytest.fail("ran"))
    for call in (engine.generate, engine.stream):
        assert message in refused(call, [1, 2], **{"max_new_tokens": 5, **sampling})


def test_parameters_as_large_as_they_may_be_are_taken(engine):
    generation = engine.generate([1, 2], max_new_tokens=20, top_k=2**40, seed=2**64 - 1)
    assert len(generation.token_ids) == 20


def test_an_engine_that_can_sample_serves_large_parameters(folders):
    generation = jaxspec.generate(
        [1, 2], folders["target"], progress=False, max_new_tokens=4, temperature=1.0, top_k=2**40, seed=1
    )
    assert len(generation.token_ids) == 4


def test_a_drafter_made_for_shorter_texts_is_warned_about(folders, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(folders["eagle3"], short)
    config = json.loads((short / "config.json").read_text("utf-8"))
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 31}), "utf-8")
    drafter = {"kind": "eagle3", "source": str(short)}
    with pytest.warns(UserWarning, match="trained on 31 positions and max_model_len is 32"):
        jaxspec.load(folders["target"], drafter=drafter, sampling_modes=("greedy",), progress=False, **SIZES)


def test_a_drafter_is_named_in_any_form(folders):
    assert drafter_keys(None) == {}
    assert drafter_keys("ngram") == {"kind": "ngram"}
    assert drafter_keys({"max_ngram": 2}) == {"max_ngram": 2}
    assert drafter_keys(DrafterConfig("ngram", 3)) == vars(DrafterConfig("ngram", 3))
    shipped = drafter_keys("smollm2-135m-eagle3")
    assert DrafterConfig(**shipped) == load_config("smollm2-135m-eagle3").drafter
    for head in (folders["eagle3"], str(folders["eagle3"])):
        found = drafter_keys(head)
        assert (found["kind"], found["source"], found["file"]) == ("eagle3", str(head), None)
    assert drafter_keys(folders["target"])["kind"] == "draft_model"


def test_load_takes_a_drafter_by_name(folders):
    options = {"sampling_modes": ("greedy",), "progress": False, **SIZES}
    with jaxspec.load(folders["target"], drafter=folders["eagle3"], **options) as engine:
        drafted = engine.generate([1, 2, 3], max_new_tokens=5)
    with jaxspec.load(folders["target"], drafter="none", **options) as engine:
        assert engine.num_speculative_tokens == 0
        assert engine.generate([1, 2, 3], max_new_tokens=5).token_ids == drafted.token_ids
    assert drafted.stats.drafted > 0


def test_a_configuration_stands_for_its_target_and_its_drafter():
    pair = load_config("smollm2-135m-eagle3")
    config = Config("mine", SourceConfig("smollm2-135m"), DrafterConfig("eagle3", source=pair.name))
    assert config.target == pair.target
    own = config.drafter
    assert (own.source, own.file, own.sha256) == (
        pair.drafter.source,
        pair.drafter.file,
        pair.drafter.sha256,
    )
    drafting = config.replace(drafter={"kind": "draft_model", "source": "smollm2-135m"}).drafter
    assert SourceConfig(drafting.source, drafting.file, drafting.sha256) == pair.target


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1, 2, 3]),
        jnp.array([1, 2, 3]),
        list(jnp.array([1, 2, 3])),
        (np.int64(1), jnp.int32(2), np.array(3)),
        np.array([1, 2, 3], np.uint16),
    ],
    ids=["numpy", "jax", "jax scalars", "mixed", "uint16"],
)
def test_token_ids_may_be_arrays(engine, prompt):
    assert engine.generate(prompt, max_new_tokens=2).prompt_token_ids == [1, 2, 3]


def test_an_array_of_two_rows_is_two_prompts(engine):
    for prompts in (jnp.array([[1, 2], [3, 4]]), [jnp.array([1, 2]), np.array([3, 4])]):
        answers = engine.generate(prompts, max_new_tokens=2)
        assert [answer.prompt_token_ids for answer in answers] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("prompt", [jnp.array([1.0]), jnp.array([True]), jnp.array(3)])
def test_an_array_of_anything_else_is_refused(engine, prompt):
    assert "prompt must be a string" in refused(engine.generate, prompt)


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_parameters_may_be_numbers_of_arrays(of):
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.5, "seed": 7, "max_new_tokens": 5}
    given |= {"num_speculative_tokens": 2, "ignore_eos": True, "logprobs": 4}
    params = jaxspec.SamplingParams(
        **{name: of(value) for name, value in given.items()}, stop_token_ids=of([4, 5])
    )
    assert params == jaxspec.SamplingParams(**given, stop_token_ids=(4, 5))
    assert {type(value) for value in vars(params).values()} <= {int, float, bool, tuple, str, type(None)}
    config = resolve_config("smollm2-135m").replace(
        engine={"batch_size": of(2)}, drafter={"num_speculative_tokens": of(3)}
    )
    assert (config.engine.batch_size, config.drafter.num_drafts) == (2, 3)
    assert type(config.engine.batch_size) is int


@pytest.mark.parametrize("name", ["raww", "max_tokens"])
def test_a_keyword_that_a_request_does_not_have_is_refused_in_its_name(tiny_engine, name):
    with pytest.raises(TypeError, match=rf"make_request\(\) got an unexpected keyword argument '{name}'"):
        tiny_engine.make_request([1], jaxspec.SamplingParams(), **{name: 3})
