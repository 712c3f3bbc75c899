"""Every option of batch runs, in this process, in replicas and on Ray, reaches the engine and the rows."""

import dataclasses
import json
import os
import sys
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest
from fake_engine import FakeEngine
from options import assert_complete, fields, parameters

from jaxspec import DrafterConfig, EngineConfig, SamplingParams
from jaxspec.config import load_config
from jaxspec.service.batch import BatchRun, ProcessReplica, ReplicaRun, Row, actor, ray, run_settings
from jaxspec.service.batch.replica import Work
from jaxspec.service.batch.run import row_seed

PARAMS = SamplingParams(
    temperature=0.7,
    top_k=5,
    top_p=0.3,
    min_p=0.2,
    seed=3,
    max_new_tokens=7,
    stop=("a", "b"),
    stop_token_ids=(4, 5),
    ignore_eos=True,
    num_speculative_tokens=2,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=0.5,
    logit_bias={7: 2.0},
    bad_words=("c", (8, 9)),
    min_tokens=2,
    no_repeat_ngram_size=3,
    json_schema={"type": "null"},
)
"""Without a default among them, but for what excludes a schema."""
ROWS = [Row("line 1", "first", "slow"), Row("line 2", "second", "w6")]


class Echo(FakeEngine):
    """Its answers are what it was asked."""

    def make_request(self, prompt, params, *, raw=False, chat_template_kwargs=None):
        request = super().make_request(prompt, params)
        request.asked = {"prompt": prompt, "raw": raw, "params": dataclasses.asdict(params)}
        return request

    def _answer(self, request):
        told = {**request.asked, "environment": os.environ.get("JAXSPEC_TEST"), "imported": imported()}
        return dataclasses.replace(super()._answer(request), text=json.dumps(told))


def load_echo(mark):
    print(mark, file=sys.stderr, flush=True)
    return Echo(1, seconds=0.0005)


def imported():
    return "imported by a replica" in sys.modules


def told(prompt, row_id, *, raw=True, **more):
    """What an engine should have been asked for a row."""
    params = dataclasses.replace(PARAMS, seed=row_seed(3, row_id, 0))
    asked = {"prompt": prompt, "raw": raw, "params": dataclasses.asdict(params)}
    return json.loads(json.dumps({**asked, "environment": None, "imported": False, **more}))


@pytest.fixture
def importable(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import sys\nsys.modules['imported by a replica'] = None\n", "utf-8")
    yield str(path)
    sys.modules.pop("imported by a replica", None)


def texts(run):
    return [json.loads(answer.generations[0].text) for answer in run]


def test_a_run_asks_its_engine_for_what_it_is_told():
    assert_complete("BatchRun", parameters(BatchRun), {"engine", "rows", "params", "raw", "keep_order"})
    expected = [told("slow", "first"), told("w6", "second")]
    assert texts(BatchRun(Echo(), ROWS, PARAMS, raw=True, keep_order=True)) == expected
    plain = [{**each, "raw": False} for each in expected]
    assert texts(BatchRun(Echo(), ROWS, PARAMS)) == plain[::-1]


def test_replicas_ask_their_engines_for_what_they_are_told(importable):
    """Two, which get a row each."""
    options = {"load", "start", "rows", "params", "imports", "raw", "keep_order", "note"}
    assert_complete("ReplicaRun", parameters(ReplicaRun), options)
    assert_complete("Work", fields(Work), {"imports", "load", "params", "raw"})
    notes = []
    run = ReplicaRun(
        partial(load_echo, "loaded by it"),
        [partial(ProcessReplica, {"JAXSPEC_TEST": name}) for name in "ab"],
        ROWS,
        PARAMS,
        imports=[importable],
        raw=True,
        keep_order=True,
        note=notes.append,
    )
    with closing(run):
        run.start()
        assert notes == ["replica 1 says: loaded by it"]
        first, second = texts(run)
    assert {first["environment"], second["environment"]} == {"a", "b"}
    assert first == told("slow", "first", imported=True, environment=first["environment"])
    assert second == told("w6", "second", imported=True, environment=second["environment"])


# What decides an answer, and what only decides when it comes.
COUNTS = {"dtype", "exact", "cache_dtype", "packed", "cpu_activations", "max_model_len", "output_dtype"}
COUNTS |= {"gpu_activations"}
COUNTS |= {"synthetic_acceptance_length"}
SPEED = {"batch_size", "page_size", "num_pages", "prefix_caching", "prefill_chunk", "prefill_batch_size"}
SPEED |= {"mixed_prefill_tokens", "slot_sizes", "steps_per_dispatch", "tensor_parallel"}
DRAFTER = {
    "kind": "draft_model",
    "num_speculative_tokens": 2,
    "sampling": "greedy",
    "max_ngram": 7,
    "min_ngram": 2,
    "max_speculative_tokens": 9,
}


def test_a_run_is_resumed_only_with_what_decides_its_answers(tiny_config):
    """`test_batch_settings.py` has the engine's values."""
    options = {"config", "params", "raw", "keep_order", "backend", "imports"}
    assert_complete("run_settings", parameters(run_settings), options)
    assert_complete("EngineConfig", fields(EngineConfig), COUNTS, SPEED)
    for_others = {"source", "file", "sha256", "options", "draft_vocab_size", "dtype"}
    assert_complete("DrafterConfig", fields(DrafterConfig), DRAFTER, for_others)

    def settings(config, params=PARAMS, **more):
        return run_settings(config, params, **{"raw": False, "keep_order": False, **more})

    config = load_config(tiny_config)
    default = settings(config)
    chosen = settings(config.replace(engine={"packed": False, "exact": True, "output_dtype": "int4"}))
    rounded = settings(config.replace(engine={"packed": True, "gpu_activations": "float8_e4m3fn"}))
    assert rounded["engine.gpu_activations"] == "float8_e4m3fn"
    names = {name for name in {**chosen, **rounded} if name.startswith("engine.")}
    assert {f"engine.{name}" for name in COUNTS} == names
    assert chosen.keys() - default.keys() == {"engine.packed", "engine.exact", "engine.output_dtype"}
    for name, value in DRAFTER.items():
        source = {"source": str(tiny_config.parent / "model")} if name == "kind" else {}
        auto = {"num_speculative_tokens": "auto"} if name == "max_speculative_tokens" else {}
        changed = settings(config.replace(drafter={name: value, **source, **auto}))
        assert changed[f"drafter.{name}"] == value != default[f"drafter.{name}"]
    assert dataclasses.asdict(PARAMS).items() <= default.items()
    assert settings(config, raw=True)["raw"]
    assert settings(config, keep_order=True)["keep_order"]
    assert settings(config, imports=[__file__])["imports"]
    # An answer that nobody limits may fill a cache.
    assert settings(config.replace(engine={"num_pages": 9, "page_size": 8}))["engine.cache_tokens"] == 72
    assert settings(config, backend="gpu")["engine.dtype"] == "bfloat16" != default["engine.dtype"]


@pytest.fixture
def environment(monkeypatch):
    """The environment of the process of an actor."""
    values = {}
    monkeypatch.setattr(actor, "os", SimpleNamespace(environ=values))
    return values


def test_an_actor_asks_its_engine_for_what_it_is_told(monkeypatch, environment, importable):
    assert_complete("Answerer", parameters(ray.Answerer), {"model", "params", "raw", "imports", "cores"})
    loaded = []

    def load(model, **settings):
        loaded.append((model, settings))
        return Echo()

    monkeypatch.setattr(actor, "load", load)
    options = {"drafter": {"kind": "none"}, "sampling_modes": ("sampled",), "batch_size": 3}
    answerer = ray.Answerer("a model", PARAMS, raw=True, imports=[importable], cores=5, **options)
    assert loaded == [("a model", {"progress": False, **options})]
    assert "5" in environment.values()
    rows = pa.table({"id": ["first"], "prompt": ["w6"]})
    (answer,) = answerer(rows).to_pylist()
    assert json.loads(answer["text"]) == told("w6", "first", imported=True)
    environment.clear()
    (answer,) = ray.Answerer("a model", PARAMS)(rows).to_pylist()
    assert json.loads(answer["text"]) == told("w6", "first", raw=False, imported=True)
    assert not environment


@pytest.mark.parametrize(("engines", "devices", "share"), [(2, 4, 2), (None, 4, 4), (None, 1, 16), (3, 1, 3)])
def test_a_cluster_with_gpus_is_shared_as_it_is_asked(monkeypatch, engines, devices, share):
    monkeypatch.setattr(ray.ray, "cluster_resources", lambda: {"GPU": 16.0, "CPU": 64.0})
    assert_complete("share_cluster", parameters(ray.share_cluster), {"engines", "tensor_parallel"})
    found = ray.share_cluster(engines, devices)
    assert (found.backend, found.description) == ("gpu", f"{share} engines in a Ray cluster")
    assert [start.args for start in found.start] == [({"num_gpus": devices},)] * share


@pytest.mark.parametrize(("engines", "count", "cores"), [(None, 2, 8), (4, 4, 4), (1, 1, 8)])
def test_a_cluster_without_gpus_is_shared_by_its_cores(monkeypatch, engines, count, cores):
    """By default with an engine on each machine that is there."""
    nodes = [{"Alive": alive} for alive in (True, False, True)]
    monkeypatch.setattr(ray.ray, "cluster_resources", lambda: {"CPU": 16.0})
    monkeypatch.setattr(ray.ray, "nodes", lambda: nodes)
    found = ray.share_cluster(engines, 1)
    assert (found.backend, len(found.start)) == ("cpu", count)
    (options,) = found.start[0].args
    assert options["num_cpus"] == 1
    assert options["runtime_env"] == {"env_vars": {"NPROC": str(cores), "OMP_NUM_THREADS": str(cores)}}
