"""Configurations from TOML and from `config.json`."""

import dataclasses

import numpy as np
import pytest
from tiny_models import TARGET

from jaxspec.config import (
    Config,
    ConfigError,
    DrafterConfig,
    EngineConfig,
    ModelConfig,
    SourceConfig,
    list_configs,
    load_config,
)
from jaxspec.config.drafter import MAX_DRAFTS
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.files.hub import is_hub_id


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return write


def refused(call, *args, **kwargs):
    """The one-line message of the error that a call raises."""
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_shipped_configurations_load():
    assert {"smollm2-135m", "smollm2-135m-ngram"} <= set(list_configs())
    for name in list_configs():
        config = load_config(name)
        assert config.name == name
        if config.target.source.startswith("pypi:"):
            assert len(config.target.sha256) == 64
        else:
            assert is_hub_id(config.target.source)
            assert is_hub_id(config.drafter.source)


def test_the_default_is_the_configuration_that_it_extends_with_cheaper_drafts():
    default, trained = load_config("smollm2-135m"), load_config("smollm2-135m-eagle3")
    cheaper = trained.replace(drafter={"num_speculative_tokens": 2, "draft_vocab_size": 8192})
    assert dataclasses.replace(default, name=trained.name) == cheaper


def test_every_section_is_read(write):
    path = write("""
        [target]
        source = "org/model"
        [drafter]
        kind = "ngram"
        max_ngram = 5
        [engine]
        batch_size = 3
        synthetic_acceptance_length = 2
    """)
    assert load_config(path) == Config(
        "mine",
        SourceConfig("org/model"),
        DrafterConfig("ngram", max_ngram=5),
        EngineConfig(batch_size=3, synthetic_acceptance_length=2),
    )


def test_relative_sources_are_taken_from_the_files_folder(write, tmp_path, monkeypatch):
    (tmp_path / "models" / "head").mkdir(parents=True)
    monkeypatch.chdir("/")
    path = write("""
        [target]
        source = "models"
        [drafter]
        kind = "eagle3"
        source = "models/head"
    """)
    config = load_config(path)
    assert config.target.source == str(tmp_path / "models")
    assert config.drafter.source == str(tmp_path / "models" / "head")
    assert load_config(write('[target]\nsource = "org/name"')).target.source == "org/name"


def test_extends_keeps_the_base_and_changes_keys(write, tmp_path, monkeypatch):
    (tmp_path / "head").mkdir()
    monkeypatch.chdir("/")
    write('[target]\nsource = "org/model"\n[engine]\nbatch_size = 3\npage_size = 8', "base.toml")
    path = write("""
        extends = "base.toml"
        [drafter]
        kind = "eagle1"
        source = "head"
        [engine]
        batch_size = 5
    """)
    assert load_config(path) == Config(
        "mine",
        SourceConfig("org/model"),
        DrafterConfig("eagle1", source=str(tmp_path / "head")),
        EngineConfig(batch_size=5, page_size=8),
    )
    assert load_config(write('extends = "smollm2-135m"')).target == load_config("smollm2-135m").target


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[target", "not a TOML file"),
        ("", "the section [target] is missing"),
        ("target = 3", "'target' must be a section"),
        ('[target]\nfile = "x"', "target.source is missing"),
        ("[target]\nsource = 3", "target.source must be str, got 3"),
        (
            '[target]\nsource = "x"\nrevision = "y"',
            "unknown key target.revision; known: source, file, sha256",
        ),
        (
            '[target]\nsource = "x"\n[draft]\nkind = "ngram"',
            "unknown key 'draft'; did you mean 'drafter'? ",
        ),
        (
            '[target]\nsource = "x"\n[drafter]\nkindd = "ngram"',
            "key drafter.kindd; did you mean 'kind'? ",
        ),
        ('[target]\nsource = "x"\n[drafter]\nkind = "medusa"', "drafter.kind 'medusa' is unknown"),
        ('[target]\nsource = "x"\n[drafter]\nkind = "eagle3"', "drafter.source is missing"),
        ('[target]\nsource = "x"\n[engine]\nbatch_size = "8"', "engine.batch_size must be int, got '8'"),
        ('[target]\nsource = "x"\n[engine]\nbatch_size = true', "engine.batch_size must be int, got True"),
        (
            '[target]\nsource = "x"\n[engine]\nbatch_size = 4\nslot_sizes = [2, 8]',
            "engine.slot_sizes: 8 is more than the 4 of engine.batch_size",
        ),
        ('[target]\nsource = "x"\n[engine]\npage_size = 12', "engine.page_size must be a power of two"),
        ("a = " + "[" * 5000, "not a TOML file"),
        ("a" + ".a" * 100 + " = 1", "nested deeper than 8 levels"),
        ("[target]\nsource = 0x" + "f" * 5000, "not a TOML file: an integer of more than 64 bits"),
        ("[target]\nsource = " + "9" * 5000, "not a TOML file: Exceeds the limit"),
        ("#" * 2**17, "larger than 65536 bytes"),
        ('[target]\nsource = "' + "x" * 5000 + '"', "cannot be read: File name too long"),
        ('[target]\nsource = "x"\n[engine]\nbatch_size = 2147483648', "at most 2147483647, got 2147483648"),
        ('extends = "nothing"', "no configuration named 'nothing'; known: "),
        ("extends = 3", "'extends' must be a name or a path, got 3"),
        ('extends = "mine.toml"', "'extends' goes round in a circle"),
        ('extends = "smollm2-135m"\n[target]\nsource = "x"', "'extends' and [target] exclude each other"),
    ],
)
def test_bad_files_are_refused_in_one_line(write, text, message):
    assert message in refused(load_config, write(text))


def test_a_long_chain_of_files_is_refused(write):
    for i in range(10):
        write(f'extends = "{i - 1}.toml"' if i else '[target]\nsource = "x"', f"{i}.toml")
    assert load_config(write('extends = "7.toml"')).target.source == "x"
    assert "'extends' another file after 8 others" in refused(load_config, write('extends = "9.toml"'))


def test_bad_names_are_refused(tmp_path):
    assert "cannot be read: File name too long" in refused(load_config, "x" * 5000)
    assert "no configuration named 'smollm3'; did you mean 'smollm2-135m'? " in refused(
        load_config, "smollm3"
    )
    assert "no such file or folder" in refused(load_config, tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "not a TOML file" in refused(load_config, tmp_path / "bytes.toml")


@pytest.mark.parametrize(
    ("cls", "key", "value", "message"),
    [
        (DrafterConfig, "num_speculative_tokens", 0, "at least 1, got 0"),
        (DrafterConfig, "num_speculative_tokens", 65, "at most 64, got 65"),
        (DrafterConfig, "num_speculative_tokens", "many", "must be a whole number or 'auto', not 'many'"),
        (DrafterConfig, "max_speculative_tokens", 0, "at least 1, got 0"),
        (DrafterConfig, "max_speculative_tokens", 65, "at most 64, got 65"),
        (DrafterConfig, "max_ngram", 65, "at most 64, got 65"),
        (DrafterConfig, "sampling", "typical", "'probabilistic' or 'greedy'"),
        (DrafterConfig, "min_ngram", 0, "at least 1"),
        (DrafterConfig, "draft_vocab_size", 0, "at least 1"),
        (DrafterConfig, "dtype", "float16", "must be 'float8_e4m3fn' or 'int4', not 'float16'"),
        (DrafterConfig, "max_ngram", 0, "at least 1"),
        (EngineConfig, "batch_size", 0, "engine.batch_size must be a whole number of at least 1"),
        (EngineConfig, "max_model_len", 0, "engine.max_model_len"),
        (EngineConfig, "num_pages", -1, "engine.num_pages"),
        (EngineConfig, "prefill_chunk", 0, "engine.prefill_chunk"),
        (EngineConfig, "steps_per_dispatch", 0, "engine.steps_per_dispatch"),
        (EngineConfig, "dtype", "float16", "engine.dtype must be 'float32' or 'bfloat16'"),
        (EngineConfig, "synthetic_acceptance_length", 0.5, "at least 1, not 0.5"),
        (EngineConfig, "synthetic_acceptance_length", float("nan"), "at least 1"),
    ],
)
def test_values_out_of_range_are_refused(cls, key, value, message):
    needed = {"kind": "ngram"} if cls is DrafterConfig else {}
    assert message in refused(cls, **needed, **{key: value})


def test_overrides_are_checked_like_files():
    config = load_config("smollm2-135m")
    assert config.replace(drafter={"num_speculative_tokens": 7}).drafter.num_speculative_tokens == 7
    assert "unknown key engine.batchsize" in refused(config.replace, engine={"batchsize": 1})
    assert "drafter must be a mapping" in refused(config.replace, drafter="ngram")


def test_sizes_left_open_follow_the_backend_and_the_model():
    cpu = EngineConfig(batch_size=3, page_size=8).resolve(backend="cpu", model_limit=100)
    assert (cpu.max_model_len, cpu.num_pages, cpu.dtype) == (100, 3 * 13, "float32")
    assert (cpu.prefill_chunk, cpu.prefill_batch_size) == (16, 4)
    gpu = EngineConfig().resolve(backend="gpu", model_limit=131072)
    assert (gpu.max_model_len, gpu.dtype, gpu.prefill_chunk) == (8192, "bfloat16", 64)
    sizes = [
        config.resolve(backend=backend, model_limit=100, weight_bytes=size)
        for config in (EngineConfig(), EngineConfig(steps_per_dispatch=2))
        for backend, size in (("cpu", 1 << 28), ("cpu", 1 << 30), ("gpu", 1 << 31), ("gpu", 1 << 33))
    ]
    assert [size.steps_per_dispatch for size in sizes] == [8, 1, 4, 1, 2, 2, 2, 2]
    assert [size.adapts_steps for size in sizes] == [True, True, *[False] * 6]
    large = EngineConfig().resolve(backend="gpu", model_limit=100, weight_bytes=1 << 33)
    assert large.prefill_chunk == 32
    assert "past the model's limit of 100" in refused(
        EngineConfig(max_model_len=101).resolve, backend="cpu", model_limit=100
    )


def test_exact_is_refused_where_rows_depend_on_their_company():
    def resolved(backend, *, rounds=False, **fields):
        config = EngineConfig(**fields)
        return config.resolve(backend=backend, model_limit=128, rounds_activations=rounds).exact

    assert resolved("gpu", exact=True)
    assert resolved("cpu", exact=True, rounds=True)
    assert not any(resolved(backend, exact=choice) for backend in ("cpu", "gpu") for choice in (None, False))
    for fields, message in (
        ({"backend": "gpu", "dtype": "float32", "exact": True}, "needs engine.dtype 'bfloat16' on a GPU"),
        ({"backend": "cpu", "exact": True}, "needs packed weights and engine.cpu_activations 'int8'"),
        ({"backend": "gpu", "exact": "yes"}, "engine.exact must be true or false, not 'yes'"),
    ):
        assert message in refused(resolved, **fields)


def model(**changes):
    return ModelConfig.from_hf({**TARGET, **changes})


def test_absent_keys_take_the_defaults_of_the_family():
    needed = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
    least = {key: TARGET[key] for key in needed}
    llama = ModelConfig.from_hf({**least, "model_type": "llama"})
    assert (llama.num_key_value_heads, llama.head_dim) == (4, 8)
    assert (llama.max_position_embeddings, llama.rms_norm_eps, llama.rope.theta) == (2048, 1e-6, 1e4)
    flags = (llama.tie_word_embeddings, llama.attention_bias, llama.mlp_bias, llama.qk_norm)
    assert flags == (False,) * 4
    mistral = ModelConfig.from_hf({**least, "model_type": "mistral", "num_attention_heads": 16})
    assert mistral.num_key_value_heads == 8
    assert mistral.layer_types == ("sliding_attention",) * 2
    assert mistral.sliding_window == 4096
    qwen2 = ModelConfig.from_hf({**least, "model_type": "qwen2", "num_attention_heads": 32, "head_dim": 8})
    assert (qwen2.num_key_value_heads, qwen2.qkv_bias, qwen2.attention_bias) == (32, True, False)
    assert qwen2.layer_types == ("full_attention",) * 2
    qwen = ModelConfig.from_hf({**least, "model_type": "qwen3", "num_attention_heads": 64})
    assert (qwen.num_key_value_heads, qwen.head_dim, qwen.qk_norm) == (32, 128, True)


@pytest.mark.parametrize(
    ("config", "layer_types"),
    [
        ({"model_type": "llama", "sliding_window": 8}, "ff"),
        ({"model_type": "mistral", "sliding_window": None}, "ff"),
        ({"model_type": "mistral", "sliding_window": 8}, "ss"),
        ({"model_type": "qwen3", "sliding_window": 8}, "ff"),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}, "ff"),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            "fs",
        ),
        ({"model_type": "llama", "sliding_window": 8, "layer_types": "sf"}, "sf"),
    ],
)
def test_windows_apply_where_the_family_says(config, layer_types):
    spelled = {"f": "full_attention", "s": "sliding_attention"}
    if "layer_types" in config:
        config = {**config, "layer_types": [spelled[letter] for letter in config["layer_types"]]}
    assert model(**config).layer_types == tuple(spelled[letter] for letter in layer_types)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known: llama, mistral, qwen2"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": "48"}, "vocab_size must be a positive integer, got '48'"),
        ({"hidden_size": 2, "head_dim": None}, "hidden_size 2 is less than 4 heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "mamba"]}, "unknown kind 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is not set"),
    ],
)
def test_models_that_are_not_built_are_refused(changes, message):
    assert message in refused(model, **changes)


def test_a_cache_has_the_dtype_of_the_network_unless_activations_are_rounded():
    def resolved(backend, *, rounds=False, **fields):
        config = EngineConfig(**fields).resolve(backend=backend, model_limit=128, rounds_activations=rounds)
        return config.cache_dtype

    assert resolved("cpu") == "float32"
    assert resolved("gpu") == "bfloat16"
    assert resolved("cpu", cache_dtype="float16") == "float16"
    assert resolved("cpu", rounds=True) == "float16"
    assert resolved("cpu", rounds=True, cache_dtype="float32") == "float32"
    for backend in ("cpu", "gpu"):
        assert resolved(backend, cache_dtype="float8_e4m3fn") == "float8_e4m3fn"
    for backend, fields in (
        ("gpu", {"cache_dtype": "float16"}),
        ("cpu", {"cache_dtype": "bfloat16"}),
        ("cpu", {"cache_dtype": "float16", "dtype": "bfloat16"}),
    ):
        with pytest.raises(ConfigError, match=r"engine\.cache_dtype is .* it can be"):
            resolved(backend, **fields)
    with pytest.raises(ConfigError, match=r"engine\.cache_dtype must be"):
        EngineConfig(cache_dtype="int8")


@pytest.mark.parametrize(
    ("kind", "keys", "problem"),
    [
        ("ngram", {"source": "a"}, "drafter.source has no effect with kind 'ngram'"),
        ("mtp", {"dtype": "int4"}, "drafter.dtype has no effect with kind 'mtp'"),
        ("ngram", {"draft_vocab_size": 9}, "drafter.draft_vocab_size has no effect with kind 'ngram'"),
        ("ngram", {"options": {"a": 1}}, "drafter.options has no effect with kind 'ngram'"),
        ("none", {"num_speculative_tokens": 4}, "num_speculative_tokens has no effect with kind 'none'"),
        ("none", {"max_speculative_tokens": 2}, "max_speculative_tokens has no effect with kind 'none'"),
        ("eagle3", {"source": "a", "max_ngram": 5}, "drafter.max_ngram has no effect with kind 'eagle3'"),
        ("draft_model", {"source": "a", "draft_vocab_size": 9}, "draft_vocab_size has no effect"),
        ("ngram", {"num_speculative_tokens": 3, "max_speculative_tokens": 6}, "3, only with 'auto'"),
    ],
)
def test_a_key_without_effect_on_the_drafter_is_named(kind, keys, problem):
    config = Config("a", SourceConfig("b"))
    with pytest.raises(ConfigError, match=problem):
        config.replace(drafter={"kind": kind, **keys})


def test_keys_of_the_drafter_that_another_takes_the_place_of_are_no_mistake():
    head = Config("a", SourceConfig("b")).replace(
        drafter={"kind": "eagle3", "source": "c", "draft_vocab_size": 9}
    )
    assert head.replace(drafter={"kind": "ngram", "max_ngram": 5}).drafter.kind == "ngram"
    assert head.replace(drafter={"kind": "none"}).drafter.num_drafts == 0


def test_a_smaller_batch_size_leaves_out_larger_numbers_of_slots(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[target]\nsource = "x"\n[engine]\nbatch_size = 8\nslot_sizes = [2, 4, 8]')
    config = load_config(path)
    assert config.replace(engine={"batch_size": np.int64(4)}).engine.slot_sizes == (2, 4)
    assert config.replace(engine={"page_size": 8}).engine.slot_sizes == [2, 4, 8]
    with pytest.raises(ConfigError, match="slot_sizes: 8 is more than the 4"):
        config.replace(engine={"batch_size": 4, "slot_sizes": (8,)})


def test_a_drafter_made_in_python_has_no_more_drafts_than_a_configuration_allows():
    assert NGramDrafter(MAX_DRAFTS).num_speculative_tokens == MAX_DRAFTS
    with pytest.raises(ConfigError, match=r"^num_speculative_tokens must be a whole number of at most 64"):
        NGramDrafter(MAX_DRAFTS + 1)
