"""Every option of every script is read; those of what answers prompts or converts files arrive."""

import ast
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import bench_acceptance
import compare_greedy
import compare_modes
import plot_acceptance
import pytest
from bench import script as shared_script
from golden_files import golden_folder
from options import arguments, assert_complete, fields

import jaxspec
from jaxspec import AcceptanceStats, Generation, SamplingParams, provenance
from jaxspec import files as checkpoints
from jaxspec.commands import batch, bench, convert, inspect, llamacpp, train
from jaxspec.config import SourceConfig, load_config
from jaxspec.drafters import inspect as drafters_inspect

SCRIPTS = Path(__file__).parents[2] / "scripts"
COMMANDS = SCRIPTS.parent / "jaxspec" / "commands"
ELSEWHERE = {"make_goldens"}
"""A script that needs packages which are not installed here."""


def with_options():
    return [path.stem for path in sorted(SCRIPTS.glob("*.py")) if "def main(" in path.read_text("utf-8")]


@pytest.mark.parametrize("name", [name for name in with_options() if name not in ELSEWHERE])
def test_every_option_is_read(name):
    """By its name, in the script or a module of `bench/`; otherwise it is ignored in silence."""
    script = importlib.import_module(name)
    shared_files = [COMMANDS / "command_line.py", COMMANDS / "answering.py"]
    files = [SCRIPTS / f"{name}.py", *(SCRIPTS / "bench").glob("*.py"), *shared_files]
    trees = [ast.parse(path.read_text("utf-8")) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "args"}
    read |= fields(SamplingParams)  # by `sampling_params`
    # Other functions that commands share name those that they read.
    shared = ast.parse((COMMANDS / "command_line.py").read_text("utf-8"))
    read |= {node.value for node in ast.walk(shared) if isinstance(node, ast.Constant)}
    assert not arguments(script.main) - read - {"imports"}


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("bench_generate", bench),
        ("convert_checkpoint", convert),
        ("generate_batch", batch),
        ("inspect_head", inspect),
        ("train_eagle3", train),
    ],
)
def test_a_script_named_as_a_command_once_was_is_a_door_to_it(name, command):
    assert importlib.import_module(name).main is command.main


class Engine:
    """Answers every prompt with its own tokens, and records what it is asked."""

    num_speculative_tokens = 2
    max_model_len = 99
    programs = None

    def __init__(self, model, settings):
        self.model, self.settings, self.asked = model, settings, []
        self.drafter = settings.get("drafter") or {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_prepared(self):
        pass

    def generate(self, prompts, **sampling):
        self.asked.append((prompts, sampling))
        several = isinstance(prompts, list) and not isinstance(prompts[0], int)
        answers = [self.answer() for _ in (prompts if several else [prompts])]
        return answers if several else answers[0]

    def answer(self):
        stats = AcceptanceStats()
        stats.add_step(2, 1)
        return Generation("", [5, 6], "length", [1], stats)

    def make_request(self, prompt, params):
        self.asked.append((prompt, params))
        return prompt

    def run(self, requests):
        return ((i, self.answer()) for i, _ in enumerate(requests))


@pytest.fixture
def ran(monkeypatch, tmp_path, tiny_config, capsys):
    """Runs a script; returns its engines and what it prints, or writes to the file "out"."""
    for name, texts in (("a", ["w6 w7", "w8", "w9"]), ("b", ["w6"])):
        rows = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows), "utf-8")
    monkeypatch.chdir(tmp_path)
    loaded = []

    def load(model, **settings):
        loaded.append(Engine(model, settings))
        return loaded[-1]

    monkeypatch.setattr(jaxspec, "load", load)
    monkeypatch.setattr(provenance, "provenance", lambda *told, **more: {"device": "none"})
    monkeypatch.setattr(shared_script, "provenance", lambda *told, **more: {"device": "none"})
    oracle = SimpleNamespace(take_over=lambda programs: None)
    monkeypatch.setattr(compare_modes, "Oracle", lambda programs: oracle)
    monkeypatch.setattr(compare_greedy, "load", lambda config, dtype: dtype)

    def run(script, *words, status=0):
        loaded.clear()
        assert script.main([str(tiny_config), *map(str, words)]) == status
        out = tmp_path / "out"
        written = out.read_bytes() if out.exists() else None
        return SimpleNamespace(engines=[*loaded], printed=capsys.readouterr().out, written=written)

    return run


def of(prompts, found):
    """The sampling parameters of the last answers, which must be to these prompts."""
    asked, sampling = found.engines[-1].asked[-1]
    assert asked == prompts
    return sampling


def test_plot_acceptance(ran, tiny_config, tmp_path):
    options = {"output", "input", "limit", "max_new_tokens", "temperature", "num_speculative_tokens"}
    more = {"names", "device", "imports"}
    assert_complete("plot_acceptance.py", arguments(plot_acceptance.main), options, more)
    found = ran(plot_acceptance, "--output", "plain.png")
    assert (len(found.engines[0].asked[0][0]), (tmp_path / "plain.png").exists()) == (4, True)
    assert found.engines[0].drafter == {}
    words = ["--input", "a.jsonl", "--limit", 2, "--max-new-tokens", 9, "--temperature", 0.5]
    found = ran(
        plot_acceptance,
        "other",
        *words,
        "--num-speculative-tokens",
        3,
        "--output",
        "more.png",
        "--device",
        "cpu:0",
    )
    assert [engine.model for engine in found.engines] == [str(tiny_config), "other"]
    assert of(["w6 w7", "w8"], found) == {"max_new_tokens": 9, "temperature": 0.5, "seed": 0}
    settings = found.engines[0].settings
    assert (settings["drafter"], settings["sampling_modes"]) == ({"num_speculative_tokens": 3}, ("sampled",))
    assert settings["device"] == "cpu:0"


def test_compare_modes(ran, tiny_config):
    options = {"input", "limit", "max_new_tokens", "temperature", "num_speculative_tokens", "json"}
    options |= {"repeats"}
    assert_complete("compare_modes.py", arguments(compare_modes.main), options, {"config", "imports"})
    words = ["--input", "a.jsonl", "--limit", 2, "--max-new-tokens", 9, "--temperature", 0.5]
    found = ran(compare_modes, *words, "--num-speculative-tokens", 3, "--json", "out", "--repeats", 2)
    assert len(found.engines[0].asked) == 1 + 2 * 2
    assert {engine.model for engine in found.engines} == {str(tiny_config)}
    sampling = {"max_new_tokens": 9, "temperature": 0.5, "ignore_eos": True, "seed": 1}
    assert of("w8", found) == sampling
    assert all(engine.drafter == {"num_speculative_tokens": 3} for engine in found.engines)
    assert all(engine.settings["sampling_modes"] == ("sampled",) for engine in found.engines)
    assert json.loads(found.written)["sampling"]["max_new_tokens"] == 9
    assert ran(compare_modes).engines[0].settings["sampling_modes"] == ("greedy",)


def test_compare_greedy(ran, tiny_config, monkeypatch):
    options = {"input", "limit", "max_new_tokens", "dtype", "batch_size", "tie", "json"}
    assert_complete("compare_greedy.py", arguments(compare_greedy.main), options, {"config", "imports"})
    part = {"prompt": 0, "token": 1, "margin": 0.1}
    row = {"identical": 0, "tokens": 1, "acceptance_length": 1.0, "parts": [part]}
    told = []
    monkeypatch.setattr(compare_greedy, "compare", lambda target, *answers: told.append(target) or dict(row))
    words = ["--input", "a.jsonl", "--limit", 2, "--max-new-tokens", 9, "--batch-size", "2,3"]
    found = ran(compare_greedy, *words, "--dtype", "bfloat16", "--json", "out", status=1)
    assert told == ["bfloat16", "bfloat16"]
    assert [engine.settings["batch_size"] for engine in found.engines] == [1, 2, 3]
    assert {engine.settings["dtype"] for engine in found.engines} == {"bfloat16"}
    assert [engine.drafter for engine in found.engines] == [{"kind": "none"}, {}, {}]
    assert {engine.model for engine in found.engines} == {str(tiny_config)}
    assert of(["w6 w7", "w8"], found) == {"max_new_tokens": 9}
    assert json.loads(found.written)["dtype"] == "bfloat16"
    ran(compare_greedy, *words, "--tie", 0.2)  # it no longer counts as a difference


def test_bench_acceptance(ran, tiny_config):
    options = {
        "prompts",
        "head",
        "temperatures",
        "seeds",
        "limit",
        "max_new_tokens",
        "num_speculative_tokens",
    }
    rest = {"config", "batch_size", "json", "imports"}
    assert_complete("bench_acceptance.py", arguments(bench_acceptance.main), options, rest)
    head = golden_folder("eagle3-residual-normed")
    words = ["--prompts", "a.jsonl", "b.jsonl", "--temperatures", 0.5, "--seeds", 3, 4, "--limit", 2]
    words += ["--max-new-tokens", 9, "--num-speculative-tokens", 2, "--batch-size", 5, "--output", "out"]
    (engine,) = ran(bench_acceptance, *words).engines
    assert (engine.model, engine.settings["batch_size"]) == (str(tiny_config), 5)
    assert engine.drafter == {"num_speculative_tokens": 2}
    params = [params for _, params in engine.asked]
    assert [(p.temperature, p.max_new_tokens, p.seed) for p in params] == [
        (0.5, 9, seed) for prompts in (2, 1) for seed in (3, 4) for _ in range(prompts)
    ]
    found = ran(bench_acceptance, *words, "--head", head, "--head", head)
    assert [engine.drafter["source"] for engine in found.engines] == [str(head)] * 2
    assert list(json.loads(found.written)["acceptance"]) == [str(head)]


def test_bench(ran, tiny_config, monkeypatch):
    options = {"input", "limit", "max_new_tokens", "num_speculative_tokens", "peer", "first_token"}
    rest = {"config", "batch_size", "output", "imports"}
    assert_complete("jaxspec bench", arguments(bench.main), options, rest)
    peers = []

    class Peer:
        name = "a peer"

        def __init__(self, path):
            peers.append(path)

        def generate(self, ids, count):
            peers.append(count)

    monkeypatch.setattr(llamacpp, "load_peer", Peer)
    monkeypatch.setattr(llamacpp, "gguf_of", lambda checkpoint: "a file")
    words = ["--input", "a.jsonl", "--limit", 2, "--max-new-tokens", 9, "--num-speculative-tokens", 3]
    found = ran(bench, *words, "--batch-size", 5, "--output", "out")
    plain, speculative, batch = found.engines
    assert {engine.model for engine in found.engines} == {str(tiny_config)}
    three = {"num_speculative_tokens": 3}
    assert [engine.drafter for engine in found.engines] == [{"kind": "none"}, three, three]
    assert (plain.settings["batch_size"], batch.settings["batch_size"]) == (1, 5)
    assert [prompt for prompt, _ in speculative.asked] == ["w6 w7", "w6 w7", "w8"]
    assert speculative.asked[-1][1] == {"max_new_tokens": 9, "ignore_eos": True}
    assert batch.asked[-1][1]["max_new_tokens"] == 9
    figures = json.loads(found.written)
    assert (figures["batch_size"], figures["prompts"], "first_token_ms" in figures) == (5, 2, False)
    found = ran(bench, *words, "--peer", "llamacpp", "--first-token", 7, "--output", "out")
    assert peers[0] == "a file"
    assert {9, 1} < {*peers[1:]}
    assert len(found.engines[0].asked[-1][0]) == 7
    assert "llamacpp" in json.loads(found.written)["first_token_ms"]


def test_convert(monkeypatch):
    options = {"source", "output", "format", "dtype", "quantize", "file", "sha256", "imports"}
    assert_complete("jaxspec convert", arguments(convert.main), options)
    saved = []
    for form in ("orbax", "safetensors"):
        save = lambda *told, form=form, **more: saved.append((form, *told, more))  # noqa: E731
        monkeypatch.setattr(checkpoints, f"save_{form}", save)
    read = lambda source, file, sha256: SimpleNamespace(tensors={}, name=(source, file, sha256))  # noqa: E731
    monkeypatch.setattr(checkpoints, "open_checkpoint", read)
    assert convert.main(["org/from", "to"]) == 0
    words = ["--format", "safetensors", "--dtype", "float16", "--file", "f", "--sha256", "0"]
    assert convert.main(["org/from", "to", *words]) == 0
    assert convert.main(["org/from", "to", "--quantize", "int4"]) == 0
    assert [(form, to, read.name, more) for form, to, read, more in saved] == [
        ("orbax", "to", ("org/from", None, None), {"dtype": None}),
        ("safetensors", "to", ("org/from", "f", "0"), {"dtype": "float16", "quantize": None}),
        ("safetensors", "to", ("org/from", None, None), {"dtype": None, "quantize": "int4"}),
    ]


def test_inspect(monkeypatch):
    options = {"head", "target", "file", "sha256", "tensor_parallel", "imports"}
    assert_complete("jaxspec inspect", arguments(inspect.main), options)

    def inspecting(head, target, devices):
        raise InterruptedError((head, target, devices))

    def told(*words):
        with pytest.raises(InterruptedError) as error:
            inspect.main([*words])
        return error.value.args[0]

    monkeypatch.setattr(drafters_inspect, "inspect", inspecting)
    assert told("org/head") == (SourceConfig("org/head"), None, 1)
    words = ["--target", "org/target", "--file", "f", "--sha256", "0", "--tensor-parallel", "2"]
    found = SourceConfig("org/head", "f", "0"), SourceConfig("org/target"), 2
    assert told("org/head", *words) == found
    target = load_config("smollm2-135m").target
    assert told("smollm2-135m-eagle3")[1] == target
    assert told("org/head", "--target", "smollm2-135m")[1] == target
