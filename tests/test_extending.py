"""The pages on extending: their code runs, and a registered name works wherever names are accepted."""

import ast
import importlib
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import extensions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paged_rows import PagedTarget
from safetensors.numpy import load_file
from tiny_engines import ATTENTION
from tiny_models import TARGET, write_eagle1, write_target

import jaxspec
from jaxspec.attention import PackedMemory
from jaxspec.commands import inspect as inspect_head
from jaxspec.config import ModelConfig, load_config
from jaxspec.drafters.base import Build, Drafter
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.drafters.loading import load_drafter
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.files import open_checkpoint
from jaxspec.models.families.llama import Llama
from jaxspec.models.target import load_target
from jaxspec.weights.loading import export_tensors

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a target and a bigram table for it."""
    write_target(tmp_path / "model")
    extensions.write_bigram(tmp_path / "bigram")
    for family in ("chunked", "fading"):
        write_target(tmp_path / family, model_type=family)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(call, *args, **kwargs):
    """The one-line message of the ValueError that a call raises."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_pages_run(folder):
    assert list(extensions.FILES) == ["bigram.py", "parallel.py", "chunked.py", "fading.py"]
    for block in extensions.BLOCKS:
        extensions.run(block)


def code():
    """The code of the pages and of the notebooks, by name."""
    yield from ((str(i), block) for i, block in enumerate(extensions.BLOCKS))
    for path in sorted((SCRIPTS.parent / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        yield from ((path.name, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")


def listed_in(module):
    """`__all__` of a module, without importing it."""
    path = Path(jaxspec.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    nodes = ast.parse(path.read_text("utf-8")).body
    return next(
        set(ast.literal_eval(node.value))
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


def test_pages_and_notebooks_import_public_names_alone():
    """Those that a package lists, and whole modules of one level."""
    imports = [
        (name, node)
        for name, source in code()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "jaxspec"
    ]
    assert len(imports) > 8
    for name, node in imports:
        if node.module.startswith("jaxspec.lab.integrations."):  # whose packages need not be installed
            assert {alias.name for alias in node.names} <= listed_in(node.module), (
                f"{name}: {ast.unparse(node)}"
            )
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            is_module = node.module == "jaxspec.lab" and find_spec(f"jaxspec.lab.{alias.name}") is not None
            assert is_module or alias.name in module.__all__, f"{name}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", ["jaxspec.attention", "jaxspec.drafters", "jaxspec.models"])
def test_what_a_package_lists_it_has(package):
    module = importlib.import_module(package)
    assert not [name for name in module.__all__ if isinstance(getattr(module, name), ModuleType)]


def test_unknown_names_are_answered_with_all_that_are_known():
    assert ", bigram" in refused(jaxspec.DrafterConfig, "trigram")
    assert ", parallel" in refused(ModelConfig.from_hf, {"model_type": "serial"})


def test_a_toml_file_names_it_and_its_settings(folder):
    text = '[target]\nsource = "model"\n[drafter]\nkind = "bigram"\nsource = "bigram"\n'
    (folder / "mine.toml").write_text(text + "[drafter.options]\nsmoothing = 0.1\n", "utf-8")
    drafter = load_config("mine.toml").drafter
    assert (drafter.kind, drafter.options) == ("bigram", {"smoothing": 0.1})
    (folder / "bare.toml").write_text('[target]\nsource = "model"\n[drafter]\nkind = "bigram"\n', "utf-8")
    assert "drafter.source is missing: 'bigram' needs a checkpoint" in refused(load_config, "bare.toml")


def test_inspection_knows_it(folder, capsys):
    assert inspect_head.main(["bigram", "--target", "model"]) == 0
    text = capsys.readouterr().out
    assert "bigram: a bigram table, docs/writing-a-drafter.md\nfits    any of 48 tokens\n" in text
    write_target(folder / "large", vocab_size=64)
    assert inspect_head.main(["bigram", "--target", "large"]) == 1
    assert "large: the table is for 48 tokens, the target has 64" in capsys.readouterr().out
    assert inspect_head.main(["bigram"]) == 0


def test_a_drafter_made_in_python_drafts_as_from_its_checkpoint(folder):
    keys = {"kind": "bigram", "source": "bigram", "num_speculative_tokens": 3}
    target = load_target(open_checkpoint("model"), dtype=np.float32)
    made = load_drafter(jaxspec.DrafterConfig(**keys), target, Build(jnp.dtype(jnp.float32)))
    before = jax.tree.leaves(nnx.state(made))
    adaptive = '[target]\nsource = "model"\n[drafter]\nkind = "ngram"\nnum_speculative_tokens = "auto"\n'
    (folder / "adaptive.toml").write_text(adaptive, "utf-8")
    answers = []
    for drafter in (keys, made, made):  # more than one engine may have it
        sizes = {"sampling_modes": ("greedy",), "batch_size": 1, "max_model_len": 64, "progress": False}
        with jaxspec.load("adaptive.toml", drafter=drafter, **sizes) as engine:
            assert (engine.num_speculative_tokens, engine.is_adaptive) == (3, False)
            answers.append(engine.generate([3, 5, 8], max_new_tokens=24, ignore_eos=True))
    assert answers[0].stats.accepted
    assert len({(tuple(each.token_ids), each.stats.accepted, each.stats.steps) for each in answers}) == 1
    assert not any(array.is_deleted() for array in before)
    message = refused(jaxspec.load, "model", drafter=type(made))
    assert "drafter must be a name, keys of [drafter], a DrafterConfig or a Drafter, got <class" in message


def test_checkpoints_are_not_taken_for_anothers(folder):
    head = str(write_eagle1(folder / "head", folder / "model"))
    for kind, source, title in (("bigram", head, "an EAGLE-1 head"), ("eagle1", "bigram", "a bigram table")):
        message = refused(jaxspec.load, "model", drafter={"kind": kind, "source": source})
        assert f"is {title}: use kind" in message


def test_command_lines_import_a_file_first(folder, capsys, request):
    request.addfinalizer(lambda: DRAFTERS.pop("mine"))
    imported = "import jaxspec\nfrom jaxspec.drafters.kinds.none import NoDrafter\n"
    imported += "class Mine(NoDrafter):\n    title = 'one of mine'\n    recognise = lambda _: 'me'\n"
    (folder / "mine.py").write_text(imported + "jaxspec.register_drafter('mine', Mine)\n", "utf-8")
    assert inspect_head.main(["--import", "mine.py", "bigram"]) == 0
    assert "bigram: one of mine, me" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        inspect_head.main(["--import", "other.py", "bigram"])
    assert "error: --import other.py: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("register", "name", "base", "other"),
    [
        (jaxspec.register_drafter, "ngram", NGramDrafter, Llama),
        (jaxspec.register_family, "llama", Llama, NGramDrafter),
    ],
)
def test_a_name_stands_for_one_class(register, name, base, other):
    register(name, base)
    assert f"{name!r} is taken by {base.__module__}.{base.__name__}" in refused(
        register, name, type("Mine", (base,), {})
    )
    with pytest.raises(TypeError, match="'mine' must stand for a subclass of"):
        register("mine", other)


def test_export_gives_back_every_tensor_of_the_family(tmp_path):
    source = write_target(tmp_path / "parallel", model_type="parallel")
    exported = export_tensors(load_target(open_checkpoint(source), dtype=np.float32))
    tensors = load_file(source / "model.safetensors")
    assert set(exported) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)


def test_the_family_reads_its_own_keys():
    config = ModelConfig.from_hf({**TARGET, "model_type": "parallel", "layers_without_rope": [1]})
    assert (config.residual_multiplier, config.layers_without_rope) == (1.0, (1,))
    assert replace(config, layers_without_rope=()) != config
    for key, value, words in [
        ("residual_multiplier", "0.5", "a number"),
        ("residual_multiplier", True, "a number"),
        ("layers_without_rope", [1.0], "a list of integers"),
    ]:
        message = refused(ModelConfig.from_hf, {**TARGET, "model_type": "parallel", key: value})
        assert message == f"config.json: {key} must be {words}, got {value!r}"


@pytest.mark.parametrize("change", [{"residual_multiplier": 0.5}, {"layers_without_rope": []}])
def test_every_key_of_the_family_changes_its_network(tmp_path, change):
    checkpoint = open_checkpoint(write_target(tmp_path / "parallel", **ATTENTION["own family"]))
    other = replace(checkpoint, config={**checkpoint.config, **change})
    logits = []
    for each in (checkpoint, other):
        paged = PagedTarget(load_target(each, dtype=np.float32), 1, 8, page_size=8, width=8)
        logits.append(paged.feed([np.arange(3, 11)], [0])[0])
    assert np.abs(logits[0] - logits[1]).max() > 0.1


def test_a_row_sees_its_own_chunk_and_no_other(folder):
    """Rope is relative, so a chunk gives the same output alone: through the cache, and over whole texts."""
    model = load_target(open_checkpoint(folder / "chunked"), dtype=np.float32)
    text = np.arange(3, 20)
    paged = PagedTarget(model, 2, 24, page_size=8, width=17, fill=np.nan)
    (whole, alone), _, _ = paged.feed([text, text[12:]], [0, 0])
    np.testing.assert_allclose(whole[12:], alone[:5], rtol=1e-4, atol=1e-4)
    positions = jnp.arange(len(text), dtype=jnp.int32)

    @nnx.jit
    def logits_of(model, text):
        memory = PackedMemory(model.kinds, positions[None], jnp.ones((1, len(text)), jnp.int32))
        hidden, _, _ = model(text, positions, memory)
        return model.logits(hidden)

    np.testing.assert_allclose(logits_of(model, jnp.asarray(text)), whole, rtol=1e-4, atol=1e-4)


def test_every_script_that_loads_a_model_takes_files_to_import():
    without = {"check_devices.py", "check_gpu.py", "code_prompts.py", "make_goldens.py"}
    own = {file.name for file in SCRIPTS.glob("*.py") if "ArgumentParser(" in file.read_text("utf-8")}
    assert own == without


def test_a_drafter_that_says_nothing_of_loading_is_not_loaded(folder, monkeypatch):
    class Made(NGramDrafter):
        """Made in Python alone."""

        title = "a made drafter"
        plan = classmethod(Drafter.plan.__func__)

    monkeypatch.setitem(DRAFTERS, "made", Made)
    message = refused(jaxspec.load, "model", drafter={"kind": "made"}, progress=False)
    assert message == "a made drafter is made in Python: Made has no `plan` that loads it"
