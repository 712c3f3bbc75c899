"""Every option of loading reaches what it is about: the engine's arrays, its scheduler, its programs."""

import dataclasses
import json
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest
from flax import nnx
from options import assert_complete, fields, parameters
from safetensors.numpy import load_file, save_file
from tiny_gguf import gguf_tensors, hf_weights, metadata, write_gguf, write_packed_gguf
from tiny_models import write_eagle3, write_target

import jaxspec
from jaxspec import CheckpointError, ConfigError, DrafterConfig, Engine, EngineConfig
from jaxspec.config import SourceConfig, load_config
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.engine.api import load as load_module
from jaxspec.engine.device.programs import Programs
from jaxspec.files.cache import file_sha256
from jaxspec.sampling import SamplingMode
from jaxspec.weights import packed_weights


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target, a head with the order of its tokens, and a folder of two GGUF files."""
    root = tmp_path_factory.mktemp("files")
    target = write_target(root / "target")
    head = write_eagle3(root / "head", target)
    tensors = load_file(head / "model.safetensors")
    save_file({**tensors, "draft_order": np.arange(40, dtype=np.int32)}, head / "model.safetensors")
    (root / "gguf").mkdir()
    small = gguf_tensors(hf_weights())
    del small["blk.0.attn_q.bias"]
    write_gguf(root / "gguf" / "small.gguf", tensors=small)
    deep = small | {name.replace("blk.0.", "blk.1."): each for name, each in small.items()}
    write_gguf(root / "gguf" / "deep.gguf", metadata(llama__block_count=2), deep)
    write_packed_gguf(root / "packed.gguf")
    return root


@pytest.fixture
def load(files, monkeypatch):
    """Loads an engine and compiles nothing; `load.shown` are the values of `progress` that arrived."""
    shown = []
    monkeypatch.setattr(Programs, "compile", lambda self, sizes, *, progress: shown.append((sizes, progress)))

    def load(model=files / "target", **options):
        return jaxspec.load(model, **{"progress": False, **options})

    load.shown = shown
    return load


def models(engine):
    programs = engine.programs
    return programs.lowering.merge(programs.leaves)


def cache(engine):
    return jax.tree.leaves(engine.core.state.target_cache)[0]


def sizes(engine):
    return [*engine.core.preparation.sizes[1], *engine.core.programs.compiled]


# A value of every field of `EngineConfig`, and what it does to an engine.
ENGINE = {
    "batch_size": (3, lambda e: (len(e.core.state.length), e.core.scheduler.batch_size) == (3, 3)),
    "max_model_len": (40, lambda e: (e.core.state.history.shape[1], e.max_model_len) == (41, 40)),
    "page_size": (4, lambda e: e.core.scheduler.pages.page_size == 4 and 4 in cache(e).shape),
    "num_pages": (9, lambda e: e.core.scheduler.pages.num_pages == 9 and len(cache(e)) == 10),
    "prefix_caching": (False, lambda e: not e.core.scheduler.prefix_caching),
    "prefill_chunk": (8, lambda e: e.core.scheduler.chunk_size == 8),
    "prefill_batch_size": (3, lambda e: e.core.scheduler.max_chunks == 3),
    "mixed_prefill_tokens": (64, lambda e: max(size.chunks for size in sizes(e) if size.mode) == 4),
    "slot_sizes": ((3,), lambda e: {size.slots for size in sizes(e) if size.mode} == {3}),
    "steps_per_dispatch": (2, lambda e: e.core.scheduler.steps == 2 and not e.core.scheduler.adapts_steps),
    "dtype": ("bfloat16", lambda e: {e.programs.leaves[0].dtype, cache(e).dtype} == {np.dtype("bfloat16")}),
    "exact": (True, lambda e: e.programs.config.exact),
    "packed": (False, lambda e: {leaf.dtype for leaf in e.programs.leaves} == {np.dtype(np.float32)}),
    "output_dtype": ("float8_e4m3fn", lambda e: has_few_values(models(e).target, e)),
    "gpu_activations": ("float8_e4m3fn", None),
    "cpu_activations": ("float32", lambda e: cache(e).dtype == np.float32),
    "cache_dtype": ("float16", lambda e: cache(e).dtype == np.float16),
    "synthetic_acceptance_length": (2.0, lambda e: e.programs.config.synthetic_acceptance_length == 2.0),
    "tensor_parallel": (2, None),
}


@pytest.mark.parametrize("name", ENGINE)
@pytest.mark.filterwarnings("ignore:synthetic_acceptance_length:UserWarning")
def test_every_size_of_the_engine_arrives(name, load, files, monkeypatch):
    value, is_there = ENGINE[name]
    settings = {"model": files / "target", "drafter": {"kind": "ngram", "num_speculative_tokens": 3}}
    if name in ("packed", "cpu_activations", "exact"):  # they are rounded only beside packed weights
        monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
        settings["model"] = files / "packed.gguf"
    if is_there is None:
        needed = {"packed": True} if name == "gpu_activations" else {}
        with pytest.raises(ConfigError, match=f"engine.{name} is '?{value}"):  # there is one device, a CPU
            load(**settings, **needed, **{name: value})
        return
    with load(**settings, **{name: value}) as asked, load(**settings) as default:
        assert is_there(asked)
        assert not is_there(default)


# Values of `DrafterConfig` by field, and what they do to the engine's drafter.
def has_few_values(drafter, engine):
    """Whether the weights of an output are few values of FP8, with signs."""
    column = np.abs(np.asarray(drafter.head.kernel.get_value(), np.float32))[:, 0]
    return len(np.unique(column)) < 0.9 * len(column)


DRAFTER = {
    "kind": ({"kind": "ngram"}, lambda d, e: isinstance(d, NGramDrafter)),
    "num_speculative_tokens": (
        {"kind": "ngram", "num_speculative_tokens": 2},
        lambda d, e: (d.num_speculative_tokens, e.num_speculative_tokens, e.is_adaptive) == (2, 2, False),
    ),
    "max_speculative_tokens": (
        {"kind": "ngram", "num_speculative_tokens": "auto", "max_speculative_tokens": 3},
        lambda d, e: (d.num_speculative_tokens, e.num_speculative_tokens, e.is_adaptive) == (3, 3, True),
    ),
    "sampling": ({"kind": "draft_model", "sampling": "greedy"}, lambda d, e: not d.probabilistic),
    "max_ngram": ({"kind": "ngram", "max_ngram": 7}, lambda d, e: d.max_ngram == 7),
    "min_ngram": ({"kind": "ngram", "min_ngram": 2}, lambda d, e: d.min_ngram == 2),
    "draft_vocab_size": ({"kind": "eagle3", "draft_vocab_size": 9}, lambda d, e: d.draft_vocab_size == 9),
    "dtype": ({"kind": "eagle3", "dtype": "float8_e4m3fn"}, has_few_values),
    "options": ({"kind": "with options", "options": {"a": 3}}, lambda d, e: d.options == {"a": 3}),
}


class WithOptions(NGramDrafter):
    """A drafter of one's own, which reads every key."""

    weights_from = "own"
    reads = ("options", "max_ngram", "min_ngram", "draft_vocab_size", "dtype")

    @classmethod
    def plan(cls, config, target, build):
        drafter = cls(config.num_drafts)
        drafter.options = nnx.data(dict(config.options))
        return lambda _: drafter


@pytest.mark.parametrize("name", DRAFTER)
def test_every_setting_of_the_drafter_arrives(name, load, files, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "with options", WithOptions)
    settings, is_there = DRAFTER[name]
    sources = {"eagle3": "head", "draft_model": "target", "with options": "head"}
    default = {"kind": "none" if name == "kind" else settings["kind"]}
    if settings["kind"] in sources:
        source = str(files / sources[settings["kind"]])
        settings, default = {**settings, "source": source}, {**default, "source": source}
    for drafter, expected in ((settings, True), (default, False)):
        with load(drafter=drafter, batch_size=1) as engine:
            assert is_there(models(engine).drafter, engine) == expected


# Where a checkpoint comes from, of a target and of a drafter alike.
SOURCE = {"source", "file", "sha256"}


@pytest.mark.parametrize("section", ["target", "drafter"])
def test_a_checkpoint_is_the_one_that_is_named_and_has_its_hash(section, load, files, tmp_path):
    """A folder of two files, of one layer and of two."""

    def loaded(**source):
        source = {"source": str(files / "gguf"), **source}
        sections = {"target": {"source": str(files / "gguf" / "small.gguf")}, "drafter": {"kind": "none"}}
        if section == "drafter":
            sections["drafter"] = {"kind": "draft_model"}
        sections[section] |= source
        return load(write_toml(tmp_path / "config.toml", **sections), batch_size=1)

    def depth(engine):
        loaded = models(engine)
        return (loaded.target if section == "target" else loaded.drafter.model).config.num_hidden_layers

    for name, layers in (("small", 1), ("deep", 2)):
        path = files / "gguf" / f"{name}.gguf"
        for source in ({"source": str(path)}, {"file": path.name}):
            with loaded(**source) as engine:
                assert depth(engine) == layers
            with loaded(**source, sha256=file_sha256(path)) as engine:
                assert depth(engine) == layers
            with pytest.raises(CheckpointError, match="sha256 is"):
                loaded(**source, sha256="0" * 64)


def write_toml(path, **sections):
    lines = []
    for name, section in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_every_key_of_a_configuration_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "with options", WithOptions)
    engine = {name: value for name, (value, _) in ENGINE.items()}
    rounded = {"packed": True, "gpu_activations": engine.pop("gpu_activations")}
    drafter = {key: value for settings, _ in DRAFTER.values() for key, value in settings.items()}
    drafter = {**drafter, "kind": "with options", "source": "s", "file": "f", "sha256": "0"}
    del drafter["options"]
    target = {"source": "of it", "file": "g", "sha256": "1"}
    config = load_config(write_toml(tmp_path / "a.toml", target=target, drafter=drafter, engine=engine))
    assert config.target == SourceConfig(**target)
    assert config.drafter == DrafterConfig(**drafter)
    assert dataclasses.asdict(config.engine) == {**engine, "slot_sizes": [3], "gpu_activations": None}
    other = load_config(write_toml(tmp_path / "b.toml", target=target, engine=rounded)).engine
    assert {name: getattr(other, name) for name in rounded} == rounded


LOAD = {"model", "weights", "names", "drafter", "device", "sampling_modes", "progress"}
GENERATE = {
    "prompts",
    "model",
    "params",
    "raw",
    "chat_template_kwargs",
    "continue_final_message",
    "special_tokens_as_text",
    "n",
    "best_of",
    "drafter",
    "device",
    "progress",
    "engine",
}


def test_no_option_of_loading_is_without_a_test():
    assert_complete("jaxspec.load", parameters(jaxspec.load), LOAD)
    assert_complete("jaxspec.generate", parameters(jaxspec.generate), GENERATE)
    assert_complete("EngineConfig", fields(EngineConfig), ENGINE)
    assert_complete("DrafterConfig", fields(DrafterConfig), DRAFTER, SOURCE)
    assert_complete("SourceConfig", fields(SourceConfig), SOURCE)
    made_of = {
        "target",
        "drafter",
        "tokenizer",
        "eos_token_ids",
        "config",
        "mesh",
        "is_adaptive",
        "generation",
    }
    assert_complete("Engine", parameters(Engine), made_of, {"sampling_modes", "progress"})


def test_a_type_checker_knows_the_keywords_of_loading():
    keywords = get_type_hints(jaxspec.load)["engine"]
    (options,) = get_args(keywords)
    assert get_type_hints(options) == get_type_hints(EngineConfig)
    assert not options.__required_keys__


def test_modes_and_progress_arrive(load):
    for name, modes in (("greedy", {SamplingMode.GREEDY}), ("sampled", set(SamplingMode))):
        with load(sampling_modes=(name,)) as engine:
            assert set(engine.core.preparation.modes) <= modes
            assert max(engine.core.preparation.modes) == max(modes)
            compiled, progress = load.shown.pop()
            assert max(size.mode for size in compiled if size.mode is not None) == max(modes)
            assert not progress
    with load(progress=True):
        assert load.shown.pop()[1]


def test_an_engine_runs_on_the_device_that_is_asked_for(load, monkeypatch):
    """There is one here; test_devices.py has several."""
    told = []
    choose = load_module.choose_devices
    monkeypatch.setattr(load_module, "choose_devices", lambda *given: told.append(given) or choose("cpu"))
    with load(device="cpu:7") as engine:
        assert told == [("cpu:7", 1)]
        assert cache(engine).devices() == {jax.devices("cpu")[0]}
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="cpu:7"):
        load(device="cpu:7")


def test_the_end_of_an_answer_and_the_tokenizer_are_the_checkpoints(load, files, tiny_config):
    with load(files / "target") as engine:
        assert (engine.eos_token_ids, engine.tokenizer) == ((), None)
    with load(tiny_config) as engine:
        assert engine.eos_token_ids == (2,)
        assert engine.tokenizer.encode("w6 w7") == [6, 7]


def test_weights_and_their_names_arrive(load, files):
    tensors = load_file(files / "target" / "model.safetensors")
    norm = tensors["model.norm.weight"] = tensors["model.norm.weight"] + 2
    renamed = {f"other.{name}": tensor for name, tensor in tensors.items()}
    for given in ({"weights": tensors}, {"weights": renamed, "names": lambda name: name[len("other.") :]}):
        with load(**given) as engine:
            assert (models(engine).target.norm.scale[...] == norm).all()
    with pytest.raises(ConfigError, match="weights are missing"):
        load(json.loads((files / "target" / "config.json").read_text("utf-8")))


def test_generate_loads_what_it_is_told_to(load, files, monkeypatch):
    """And no more slots than prompts, nor a mode that nothing needs."""
    calls = []

    def loading(model, **options):
        calls.append((model, options))
        raise InterruptedError

    monkeypatch.setattr(load_module, "load", loading)

    def called(prompts, *model, **options):
        with pytest.raises(InterruptedError):
            jaxspec.generate(prompts, *model, **options)
        return calls.pop()

    defaults = {"drafter": None, "device": None, "sampling_modes": (SamplingMode.GREEDY,)}
    defaults |= {"progress": True, "batch_size": 1}
    assert called([1]) == ("smollm2-135m", defaults)
    assert called([1], "other") == ("other", defaults)
    assert called([[1]] * 9, drafter={"kind": "none"}) == (
        "smollm2-135m",
        {**defaults, "drafter": {"kind": "none"}, "batch_size": 8},
    )
    assert called([[1], [2]], progress=False) == (
        "smollm2-135m",
        {**defaults, "progress": False, "batch_size": 2},
    )
    assert called([1], device="gpu:1")[1]["device"] == "gpu:1"
    assert called([1], temperature=1.0)[1]["sampling_modes"] == (SamplingMode.TEMPERATURE,)
    assert called([1], engine={"batch_size": 5, "page_size": 4})[1] == {
        **defaults,
        "batch_size": 5,
        "page_size": 4,
    }
