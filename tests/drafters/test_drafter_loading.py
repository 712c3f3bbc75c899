"""Heads from their folders: what their configs mean, and heads that do not fit."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import HEAD_KINDS, HEAD_TARGETS, golden_checkpoint, golden_folder
from safetensors.numpy import load_file, save_file
from tiny_models import write_eagle1, write_eagle3, write_target
from tiny_tokenizers import byte_level

import jaxspec
from jaxspec.config import ConfigError, DrafterConfig, SourceConfig
from jaxspec.drafters.formats import drafter_keys
from jaxspec.drafters.inspect import inspect
from jaxspec.drafters.kinds.eagle3 import Eagle3Config
from jaxspec.drafters.loading import Build, load_drafter, plan_drafter
from jaxspec.files import open_checkpoint
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf
from jaxspec.models.target import load_target, target_config
from jaxspec.weights.loading import declared, export_tensors

FLOAT32 = jnp.dtype(jnp.float32)


def load(kind, source, target, **settings):
    return load_drafter(DrafterConfig(kind, source=str(source), **settings), target, Build(FLOAT32))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, an EAGLE-3 head, an EAGLE-1 head."""
    root = tmp_path_factory.mktemp("heads")
    target = write_target(root / "target", num_hidden_layers=7)
    return target, write_eagle3(root / "eagle3", target), write_eagle1(root / "eagle1", target)


@pytest.fixture(scope="module")
def target(folders):
    return load_target(open_checkpoint(folders[0]), dtype=FLOAT32)


@pytest.fixture
def changed(folders, tmp_path):
    """A copy of a head with changes to its config (None takes a key away) and its tensors."""

    def change(kind, config=None, tensors=None):
        folder = tmp_path / kind
        shutil.copytree(folders[("eagle3", "eagle1").index(kind) + 1], folder)
        for path, read, write, changes in (
            (folder / "config.json", read_json, write_json, config),
            (folder / "model.safetensors", load_file, save_file, tensors),
        ):
            content = {**read(path), **(changes or {})}
            write({key: value for key, value in content.items() if value is not None}, path)
        return folder

    return change


def read_json(path):
    return json.loads(path.read_text("utf-8"))


def write_json(content, path):
    path.write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize("case", HEAD_TARGETS)
def test_export_gives_back_every_bit(case):
    model = load_target(golden_checkpoint(HEAD_TARGETS[case]), dtype=FLOAT32)
    exported = export_tensors(load(HEAD_KINDS[case], golden_folder(case), model))
    stored = {name: tensor.read() for name, tensor in golden_checkpoint(case).tensors.items()}
    assert set(exported) == set(stored)
    for name, array in stored.items():
        assert exported[name].dtype == array.dtype
        assert exported[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("case", [case for case in HEAD_TARGETS if case != "eagle3-exported"])
def test_a_goldens_own_embedding_is_not_its_targets(case):
    """Otherwise nothing would tell which of them a head reads."""
    name = "embed_tokens.weight"
    own = golden_checkpoint(case).tensors.get(name)
    targets = golden_checkpoint(HEAD_TARGETS[case]).tensors[f"model.{name}"].read()
    assert own is None or not np.array_equal(own.read(), targets)


def test_d2t_holds_offsets(folders, target):
    stored = load_file(folders[1] / "model.safetensors")
    drafter = load("eagle3", folders[1], target)
    ids = stored["d2t"] + np.arange(len(stored["d2t"]))
    np.testing.assert_array_equal(drafter.to_target(jnp.arange(len(ids))), ids)
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), ids)
    draft_ids = np.asarray(drafter.draft_vocab.draft_ids)
    np.testing.assert_array_equal(draft_ids[ids], np.arange(len(ids)))
    assert (np.delete(draft_ids, ids) == -1).all()


def test_t2d_follows_from_d2t(changed, folders, target):
    whole, derived = (
        load("eagle3", folders[1], target),
        load("eagle3", changed("eagle3", tensors={"t2d": None}), target),
    )
    np.testing.assert_array_equal(whole.draft_vocab.draft_ids, derived.draft_vocab.draft_ids)


def test_maps_of_a_full_vocabulary_that_say_nothing_are_accepted(tmp_path, folders, target):
    folder = write_eagle3(tmp_path / "full", folders[0], draft_vocab_size=48)
    assert {"d2t", "t2d"} <= set(load_file(folder / "model.safetensors"))
    drafter = load("eagle3", folder, target)
    assert drafter.draft_vocab is None
    assert drafter.to_target(jnp.array([3, 47])).tolist() == [3, 47]


def test_rope_is_the_heads_own_and_never_the_targets(changed, tmp_path):
    other = load_target(
        open_checkpoint(write_target(tmp_path / "target", num_hidden_layers=7, rope_theta=5e5)), dtype=FLOAT32
    )
    for kind in ("eagle3", "eagle1"):
        drafter = load(kind, changed(kind), other)
        assert drafter.config.layers.rope.theta == 1e4


def test_an_embedding_is_the_heads_own_where_it_brings_one(changed, folders, target):
    own = np.random.default_rng(0).normal(size=(48, 32)).astype(np.float32)
    for kind in ("eagle3", "eagle1"):
        drafter = load(kind, changed(kind, tensors={"embed_tokens.weight": own}), target)
        np.testing.assert_array_equal(drafter.embedding.table[...], own)
    assert load("eagle3", folders[1], target).embedding is None
    assert load("eagle1", folders[2], target).embedding is None


def test_a_head_without_output_rows_takes_the_targets(changed, folders, target):
    drafter = load("eagle3", changed("eagle3", tensors={"lm_head.weight": None}), target)
    stored = load_file(folders[1] / "model.safetensors")
    ids = stored["d2t"] + np.arange(len(stored["d2t"]))
    rows = load_file(folders[0] / "model.safetensors")["lm_head.weight"][ids]
    np.testing.assert_array_equal(np.asarray(drafter.head.kernel[...]).T, rows)


@pytest.mark.parametrize("own_rows", [True, False])
def test_a_smaller_draft_vocabulary_has_the_most_frequent_tokens(changed, folders, target, own_rows):
    order = np.random.default_rng(3).permutation(40).astype(np.int32)
    tensors = {"draft_order": order} | ({} if own_rows else {"lm_head.weight": None})
    folder = changed("eagle3", tensors=tensors)
    whole, small = load("eagle3", folder, target), load("eagle3", folder, target, draft_vocab_size=9)
    kept = np.sort(order[:9])
    np.testing.assert_array_equal(small.target_ids[...], whole.target_ids[...][kept])
    draft_ids = np.full(48, -1)
    draft_ids[small.target_ids[...]] = np.arange(9)
    np.testing.assert_array_equal(small.draft_vocab.draft_ids, draft_ids)
    np.testing.assert_array_equal(small.head.kernel[...], whole.head.kernel[...][:, kept])
    assert small.draft_vocab_size == 9
    assert load("eagle3", folder, target, draft_vocab_size=40).draft_vocab_size == 40
    assert load("eagle3", folders[1], target, draft_vocab_size=41).draft_vocab_size == 40


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (None, "does not say which of its tokens are the most frequent: it has no draft_order"),
        (np.arange(1, 41), "draft_order must hold each draft id once"),
        (np.zeros(40, np.int32), "draft_order must hold each draft id once"),
        (np.arange(39), "draft_order must hold each draft id once"),
        (np.arange(40.0), "draft_order must hold each draft id once"),
    ],
)
def test_a_head_whose_most_frequent_tokens_are_unknown(changed, target, order, message):
    folder = changed("eagle3", tensors={"draft_order": order})
    with pytest.raises(ValueError, match=message):
        load("eagle3", folder, target, draft_vocab_size=9)


def config_of(folders, config, *names):
    """What an EAGLE-3 config means on the seven-layer target, given the names of its tensors."""
    return Eagle3Config.from_hf(config, dict.fromkeys(names), target_config(open_checkpoint(folders[0])))


def plain(folders, **changes):
    config = {**read_json(folders[1] / "config.json"), **changes}
    return {key: value for key, value in config.items() if value is not None}


def speculators(folders, **changes):
    layer = {
        k: v
        for k, v in plain(folders).items()
        if k not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "transformer_layer_config": layer,
        **changes,
    }


def test_layer_ids_are_counted_as_each_producer_counts_them(folders):
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}
    none = {"eagle_aux_hidden_state_layer_ids": None}
    assert config_of(folders, plain(folders, **none)).capture == (2, 3, 4)
    assert config_of(folders, plain(folders, **none, **nested)).capture == (1, 3, 6)
    assert config_of(folders, speculators(folders)).capture == (2, 3, 4)
    listed = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
    assert config_of(folders, speculators(folders, **listed)).capture == (0, 3, 7)
    unfused = {"eagle_config": {"use_aux_hidden_state": False}}
    assert config_of(folders, plain(folders, **none, **unfused)).capture == ()


def test_flags_whose_default_depends_on_the_format(folders):
    assert not config_of(folders, plain(folders)).norm_before_residual
    assert config_of(folders, speculators(folders)).norm_before_residual
    assert not config_of(folders, speculators(folders, norm_before_residual=False)).norm_before_residual
    for form in (plain, speculators):
        assert config_of(folders, form(folders, norm_output=True)).norm_output
        assert not config_of(folders, form(folders, norm_output=False)).norm_output
        assert not config_of(folders, form(folders)).norm_output
    nested = {"eagle_config": {"norm_before_fc": True}}
    assert config_of(folders, plain(folders, **nested), "input_norm.weight").norm_before_fc
    assert not config_of(folders, plain(folders)).norm_before_fc


def test_query_and_key_norms_come_with_qwen3_layers(folders):
    assert not config_of(folders, speculators(folders)).layers.qk_norm
    qwen = speculators(folders)
    qwen["transformer_layer_config"]["model_type"] = "qwen3"
    assert config_of(folders, qwen).layers.qk_norm
    assert config_of(folders, plain(folders, architectures=["Eagle3Qwen3ForCausalLM"])).layers.qk_norm
    assert not config_of(folders, plain(folders, architectures=["LlamaForCausalLMEagle3"])).layers.qk_norm


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "message"),
    [
        ("eagle3", {"hidden_size": 16}, {}, "for targets of hidden size 16, this one has 32"),
        ("eagle3", {"target_hidden_size": 24}, {}, "for targets of hidden size 24, this one has 32"),
        ("eagle3", {"vocab_size": 64}, {}, "for a vocabulary of 64, the target's has 48"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}, {}, "layer 8, but the target has 7"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [-1, 3, 7]}, {}, "layer -1, but the target has 7"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "all"}, {}, "a list of integers, got 'all'"),
        (
            "eagle3",
            {"hidden_size": 16, "target_hidden_size": 32},
            {},
            "brings no embed_tokens.weight of its own",
        ),
        (
            "eagle3",
            {
                "hidden_size": 16,
                "target_hidden_size": 32,
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"use_aux_hidden_state": False},
            },
            {},
            "of width 32 directly, but is 16 wide",
        ),
        ("eagle3", {"model_type": "t5"}, {}, "model_type 't5' is not supported"),
        ("eagle3", {"draft_vocab_size": 39}, {}, "expected [39"),
        ("eagle3", {}, {"fc.weight": None}, "'fc.weight' is missing"),
        (
            "eagle3",
            {},
            {"fc.weight": np.zeros((32, 64), np.float32)},
            "has shape [32, 64], expected [32, 96]",
        ),
        ("eagle3", {}, {"fc.bias": np.ones(32, np.float32)}, "spare tensor 'fc.bias'"),
        ("eagle3", {}, {"d2t": np.arange(40) * 2}, "d2t reaches token 117, past the vocabulary of 48"),
        ("eagle3", {}, {"d2t": -np.arange(40)}, "d2t does not give increasing token ids"),
        ("eagle3", {}, {"t2d": np.ones(48, bool)}, "d2t and t2d name different tokens"),
        ("eagle3", {}, {"d2t": np.ones(40, np.float32)}, "d2t is float32 of shape [40], but must hold an"),
        ("eagle3", {}, {"d2t": np.ones((40, 1), int)}, "d2t is int64 of shape [40, 1], but must hold an"),
        ("eagle3", {}, {"t2d": np.ones(48, int)}, "t2d is int64 of shape [48], but must hold true or false"),
        ("eagle3", {"num_target_layers": 6}, {}, "for targets of 6 layers, this one has 7"),
        ("eagle3", {"fc_norm": True}, {}, "fc_norm is True, but there is no 'fc_norm.0.weight'"),
        ("eagle3", {"eagle_config": {"norm_before_fc": True}}, {}, "there is no 'input_norm.weight'"),
        (
            "eagle3",
            {"eagle_config": {"use_mtp_layernorm": True}},
            {},
            "use_mtp_layernorm True is not supported",
        ),
        ("eagle1", {"hidden_size": 16}, {}, "the head has hidden_size 16, the target 32"),
        ("eagle1", {"vocab_size": 64}, {}, "the head has vocab_size 64, the target 48"),
        ("eagle1", {"bias": None}, {}, "'fc.bias' is missing"),
        ("eagle1", {}, {"norm.weight": np.ones(32, np.float32)}, "spare tensor 'norm.weight'"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(changed, target, kind, config, tensors, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load(kind, changed(kind, config, tensors), target)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


UNKNOWN = [
    *((case, ()) for case in HEAD_TARGETS),
    *((case, ("transformer_layer_config",)) for case in ("eagle3-fc-norm", "peagle", "dflash-speculators")),
    *((case, ("dflash_config",)) for case in ("dflash", "dflash-causal")),
    ("eagle3-safeailab", ("eagle_config",)),
    ("gemma4-assistant", ("text_config",)),
]


@pytest.mark.parametrize(("case", "place"), UNKNOWN)
def test_a_key_that_nobody_knows_is_named(tmp_path, case, place):
    """A head that is misread changes no answer, so nothing else would tell."""
    config = read_json(golden_folder(case) / "config.json")
    inside = config
    for name in place:
        inside = inside.setdefault(name, {})
    folder = tmp_path / "head"
    shutil.copytree(golden_folder(case), folder)
    model = target_config(golden_checkpoint(HEAD_TARGETS[case]))
    plan = DrafterConfig(HEAD_KINDS[case], source=str(folder), num_speculative_tokens=1)
    inside |= {"causal_tail": None, "use_cache": True, "num_anchors": 512}
    write_json(config, folder / "config.json")
    plan_drafter(plan, model, Build(FLOAT32))
    assert inspect(SourceConfig(str(folder))).problem is None
    inside["causal_tail"] = True
    write_json(config, folder / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: .*causal_tail True is not known of an? ") as error:
        plan_drafter(plan, model, Build(FLOAT32))
    assert "\n" not in str(error.value)
    assert "causal_tail True" in inspect(SourceConfig(str(folder))).problem


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "peagle", "dflash", "draft_model"])
@pytest.mark.parametrize("case", ["eagle3-norm-output", "eagle3-safeailab", "eagle1", "peagle", "dflash"])
def test_a_head_of_another_kind_is_refused_by_name(target, kind, case):
    right = HEAD_KINDS[case]
    if kind != right:
        with pytest.raises(ValueError, match=f"drafter.kind is '{kind}', but .* head: use kind '{right}'"):
            load(kind, golden_folder(case), target)


@pytest.mark.parametrize("vocab_size", [40, 64])
def test_a_draft_model_may_have_another_number_of_rows(tmp_path, target, vocab_size):
    drafter = load("draft_model", write_target(tmp_path / "other", vocab_size=vocab_size), target)
    assert drafter.draft_vocab.target_ids.tolist() == [min(i, 47) for i in range(vocab_size)]
    assert drafter.draft_vocab.draft_ids.tolist() == [i if i < vocab_size else -1 for i in range(48)]


def tokenizer(swapped=(), added=(), **changes):
    """The tokenizer of a GGUF, with two tokens swapped and some more at the end."""
    values = byte_level(**changes)
    tokens = values["tokenizer.ggml.tokens"]
    for a, b in swapped:
        tokens[a], tokens[b] = tokens[b], tokens[a]
    tokens += added
    values["tokenizer.ggml.token_type"] += [3] * len(added)
    return tokenizer_from_gguf(values, "tiny")


@pytest.mark.parametrize(
    ("own", "fits"),
    [
        (tokenizer(), True),
        (tokenizer(added=["<pad>", "<|tool|>"]), True),
        (tokenizer(swapped=[(0, 3)]), True),  # both are added tokens
        (tokenizer(swapped=[(40, 41)]), False),
    ],
)
def test_a_draft_model_with_other_tokens_is_refused(tmp_path, target, own, fits):
    other = write_target(tmp_path / "other")
    own.save(other)
    build = Build(FLOAT32, tokenizer=tokenizer(added=["<|end|>"]))
    config = DrafterConfig("draft_model", source=str(other))
    if fits:
        load_drafter(config, target, build)
        return
    with pytest.raises(ValueError, match=r"but token 40 is '.', in the target '.'"):
        load_drafter(config, target, build)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_head_with_other_tokens_is_refused(changed, target, kind):
    """If its folder has a tokenizer."""
    folder = changed(kind)
    config, build = DrafterConfig(kind, source=str(folder)), Build(FLOAT32, tokenizer=tokenizer())
    tokenizer(added=["<mask>"]).save(folder)
    load_drafter(config, target, build)
    tokenizer(swapped=[(40, 41)]).save(folder)
    with pytest.raises(ConfigError, match=r"an EAGLE-. head must have .* token 40 is '.', in the target '.'"):
        load_drafter(config, target, build)


@pytest.mark.parametrize("own_rows", [True, False])
def test_a_heads_matrices_are_rounded_if_asked(changed, folders, target, own_rows):
    """Also output rows that are copies of the target's."""
    source = folders[1] if own_rows else changed("eagle3", tensors={"lm_head.weight": None})
    usual, rounded = (load("eagle3", source, target, dtype=each) for each in (None, "float8_e4m3fn"))
    pairs = zip(declared(usual), declared(rounded), strict=True)
    for (exact, stored), (weight, _) in pairs:
        one, other = (np.asarray(each.get_value(), np.float32) for each in (exact, weight))
        is_matrix = stored.tensors[0][0].endswith(("_proj.weight", "fc.weight", "lm_head.weight"))
        assert np.array_equal(one, other) != is_matrix
        np.testing.assert_allclose(other, one, rtol=0.13, atol=0.01 * np.abs(one).max())


def test_what_all_names_of_a_head_begin_with_is_named(changed):
    folder = changed("eagle3")
    arrays = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": array for name, array in arrays.items()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no drafter; .*; the names of all tensors begin with 'module\.'"):
        drafter_keys(folder)


def test_the_longest_text_decides_over_longrope_of_a_draft_model_too():
    folder = golden_folder("phi3-long")
    drafter = {"kind": "draft_model", "source": str(folder), "num_speculative_tokens": 3}
    with jaxspec.load(folder, drafter=drafter, max_model_len=24, page_size=8, progress=False) as engine:
        assert (engine.target.config.rope.kind, engine.target.config.rope.length) == ("longrope", 24)
        assert engine.drafter.model.config.rope == engine.target.config.rope
