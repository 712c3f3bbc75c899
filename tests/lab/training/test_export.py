"""Exported heads, read back by the loader: the same logits in every format that can hold the head."""

import exported_head
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import golden_folder
from safetensors.numpy import load_file
from tiny_run import write_target

from jaxspec.attention import PackedMemory
from jaxspec.config import ConfigError, DrafterConfig
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.files import open_checkpoint
from jaxspec.lab.training.config import HeadConfig
from jaxspec.lab.training.export import FORMATS, embedding_rows, export_head
from jaxspec.lab.training.head import head_config, is_trained, new_head, start_from
from jaxspec.models.target import load_target
from scripts.export_head import main

IDS = np.arange(5, 245, 3, dtype=np.int32)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target") / "target")
    return load_target(open_checkpoint(folder), dtype=jnp.float32)


def trained(target, **shape):
    """A head whose every weight differs from a new one's."""
    config = head_config(HeadConfig(**shape), target.config, IDS.size)
    head = new_head(config, target, IDS, num_speculative_tokens=3, seed=0)
    graph, weights, rest = nnx.split(head, nnx.Param, ...)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    noisy = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape), weights)
    head = nnx.merge(graph, noisy, rest)
    head.head.kernel.set_value(target.output_kernel[:, IDS])
    return head


def export(head, target, folder, form, **more):
    export_head(
        head,
        target.config,
        folder,
        form=form,
        target_name="tiny",
        dtype="float32",
        embedding=embedding_rows(target),
        card="# A head",
        **more,
    )
    config = DrafterConfig(kind="eagle3", num_speculative_tokens=3, source=str(folder))
    return load_drafter(config, target, Build(jnp.dtype(jnp.float32)))


@nnx.jit
def logits(head, target):
    rng = np.random.default_rng(2)
    captured = tuple(jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 4, 32)))
    fused = head.fuse(captured[0], captured)
    tokens, positions = jnp.asarray(rng.integers(0, 259, 4)), jnp.arange(4)
    memory = PackedMemory(head.kinds, positions[None], jnp.ones((1, 4), jnp.int32))
    hidden, _ = head.advance(target, tokens, fused, positions, memory)
    return head.logits(target, hidden)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_back_the_same_head(target, tmp_path, form):
    head = trained(target)
    read = export(head, target, tmp_path / form, form)
    np.testing.assert_array_equal(read.target_ids[...], IDS)
    assert read.config.layers.rope.theta == 10000.0
    assert read.needs == head.needs
    np.testing.assert_array_equal(logits(read, target), logits(head, target))


@pytest.mark.parametrize("form", ["speculators", "shared"])
def test_speculators_flags_survive(target, tmp_path, form):
    flags = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
    head = trained(target, num_layers=2, rope_theta=5e5, capture=(1, 2, 4), **flags)
    read = export(head, target, tmp_path / form, form)
    assert read.needs == head.needs
    assert read.config.layers.rope.theta == 5e5
    assert all(getattr(read.config, flag) for flag in flags)
    np.testing.assert_array_equal(logits(read, target), logits(head, target))


@pytest.mark.parametrize("form", FORMATS)
def test_only_shared_leaves_output_rows_to_the_target_and_only_speculators_has_its_embedding(
    target, tmp_path, form
):
    export(trained(target), target, tmp_path / form, form)
    tensors = open_checkpoint(tmp_path / form).tensors
    assert ("lm_head.weight" in tensors) == (form != "shared")
    assert ("embed_tokens.weight" in tensors) == (form == "speculators")
    assert (tmp_path / form / "README.md").read_text() == "# A head"


def test_what_speculators_loaded_is_what_is_exported(tmp_path):
    """speculators has run the golden's checkpoint; `drafters/test_eagle.py` has its logits."""
    exported_head.write(tmp_path / "head")
    golden = golden_folder(exported_head.NAME)
    assert (tmp_path / "head" / "config.json").read_text() == (golden / "config.json").read_text()
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "head", golden))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name], array)


def test_shared_keeps_which_tokens_are_frequent(target, tmp_path):
    order = np.random.default_rng(0).permutation(IDS.size).astype(np.int32)
    for form in FORMATS:
        export(trained(target), target, tmp_path / form, form, order=order)
        assert ("draft_order" in open_checkpoint(tmp_path / form).tensors) == (form == "shared")
    folder = write_target(tmp_path / "target")
    arguments = [tmp_path / "shared", tmp_path / "again", "--target", folder, "--format", "shared"]
    assert main([*map(str, arguments)]) == 0
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "again").tensors["draft_order"].read(), order)


@pytest.mark.parametrize("form", FORMATS)
def test_a_head_goes_from_one_format_into_another(target, tmp_path, form, capsys):
    folder = write_target(tmp_path / "target")
    read = export(trained(target), target, tmp_path / "first", "safeailab")
    arguments = [tmp_path / "first", tmp_path / form, "--target", folder, "--format", form]
    assert main([*map(str, arguments), "--dtype", "float32"]) == 0
    config = DrafterConfig(kind="eagle3", num_speculative_tokens=3, source=str(tmp_path / form))
    again = load_drafter(config, target, Build(jnp.dtype(jnp.float32)))
    np.testing.assert_array_equal(logits(again, target), logits(read, target))
    assert (tmp_path / form / "README.md").read_text().startswith("# A head")
    assert main([*map(str, arguments)]) == 2
    assert "exists already; nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_layers": 2}, "holds one layer, the head has 2"),
        ({"fc_norm": True}, "has no fc_norm"),
        ({"norm_before_residual": True}, "has no norm_before_residual"),
        ({"rope_theta": 5e5}, "takes 10000, the head 500000"),
        ({"capture": (1, 2, 3)}, r"reads the hidden states \[2, 2, 2\]"),
    ],
)
def test_safeailab_refuses_what_it_cannot_hold(target, tmp_path, shape, message):
    with pytest.raises(ConfigError, match=message):
        export(trained(target, **shape), target, tmp_path / "head", "safeailab")
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten(target, tmp_path):
    (tmp_path / "head").mkdir()
    with pytest.raises(ConfigError, match="exists already; nothing was written"):
        export(trained(target), target, tmp_path / "head", "shared")


def test_a_head_starts_from_an_exported_one_of_another_vocabulary(target, tmp_path):
    head = trained(target, fc_norm=True)
    read = export(head, target, tmp_path / "first", "shared")
    shape, ids = head_config(HeadConfig(fc_norm=True), target.config, 100), np.arange(100, dtype=np.int32)
    new = new_head(shape, target, ids, num_speculative_tokens=3, seed=5)
    start_from(new, read, target)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(x, is_trained)) for x in (new, head)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(new.target_ids[...], ids)
    np.testing.assert_array_equal(new.head.kernel[...], target.output_kernel[:, ids])


def test_a_head_of_another_shape_is_no_start(target, tmp_path):
    read = export(trained(target), target, tmp_path / "first", "shared")
    shape = head_config(HeadConfig(intermediate_size=16), target.config, IDS.size)
    new = new_head(shape, target, IDS, num_speculative_tokens=3, seed=5)
    with pytest.raises(ConfigError, match=r"head.initial: its first.mlp.* is .*48.*, that of .* is .*16"):
        start_from(new, read, target)
