"""Every option of `jaxspec` and of `jaxspec batch`, in each of its three ways, reaches what it is about."""

import io
import json
import re
import sys
import tempfile
from functools import partial

import jax
import pytest
from golden_files import golden_folder
from options import PROMPT, SAMPLING, answer_to, arguments, assert_complete, same, submitted

import jaxspec
from jaxspec import SamplingParams
from jaxspec import __main__ as command
from jaxspec.commands import batch as batch_command
from jaxspec.commands import batch_job
from jaxspec.commands import chat as chat_command
from jaxspec.sampling import SamplingMode, required_mode
from jaxspec.service.batch import Engines, ProcessReplica, ray
from jaxspec.service.batch.ray import RayReplica
from jaxspec.service.batch.run import row_seed

ONLY_FROM_PYTHON = {"num_speculative_tokens"}
FLAGS = {name: change for name, change in SAMPLING.items() if name not in ONLY_FROM_PYTHON}
"""The sampling parameters that command lines take. Theirs of this name sets the drafter's K."""
OF_CHAT = {name: change for name, change in FLAGS.items() if not name.startswith("logprobs")}


def write_json(value):
    """The path of a file that holds a value."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False, encoding="utf-8") as file:
        json.dump(value, file)
    return file.name


def flags(options):
    """The command line's form of sampling parameters."""
    words = []
    for name, value in options.items():
        if name == "json_schema":
            value = write_json(value)
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif name == "logit_bias":
            words += [word for token, bias in value.items() for word in (flag, f"{token}={bias}")]
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [flag, str(each)]
    return words


@pytest.fixture
def importable(tmp_path):
    """A file for --import, which leaves a mark."""
    path = tmp_path / "mine.py"
    path.write_text("import sys\nsys.modules['imported by --import'] = None\n", "utf-8")
    yield path
    sys.modules.pop("imported by --import", None)


def test_every_sampling_option_of_the_command_reaches_the_answer(engine, plain, monkeypatch, capsys):
    monkeypatch.setattr(jaxspec, "load", lambda model, **settings: engine)
    cases = [({}, True), *((change.options(name, plain), False) for name, change in FLAGS.items())]
    for options, raw in cases:
        with submitted(engine) as requests:
            assert command.main([PROMPT, *flags(options), *(["--raw"] if raw else [])]) == 0
        expected = answer_to(engine, PROMPT, options, raw=raw)
        assert same(requests[0].generation()) == same(expected), options
        out = capsys.readouterr().out
        assert out.startswith(expected.text + "\n")
        assert ("logprobs" in options) == (out != expected.text + "\n")


def printed(answer):
    """The lines of an answer's log-probabilities: each, the token, and the most likely ones."""
    decode = answer.tokenizer.decode
    return [
        "  ".join(
            [f"{logprob:9.4f}", repr(text)]
            + [f"{decode([token], skip_special_tokens=False)!r} {value:.4f}" for token, value in top.items()]
        )
        for logprob, text, top in zip(answer.logprobs, answer.token_texts, answer.top_logprobs, strict=True)
    ]


def test_several_answers_of_the_command(engine, monkeypatch, capsys):
    """As text with log-probabilities, as lines of JSON, and the best of some."""
    monkeypatch.setattr(jaxspec, "load", lambda model, **settings: engine)
    options = {"temperature": 1.0, "seed": 4, "max_new_tokens": 4, "logprobs": 2}
    words = flags(options)
    drawn = engine.generate(PROMPT, n=3, **options)
    assert command.main([PROMPT, *words, "--n", "3"]) == 0
    told = capsys.readouterr()
    assert told.out == "\n".join("\n".join([answer.text, *printed(answer), ""]) for answer in drawn)
    assert [f"seed {answer.seed}]" in told.err for answer in drawn] == [True] * 3
    for more, expected in (
        ({"n": 3}, drawn),
        ({"n": 2, "best_of": 3}, engine.generate(PROMPT, n=2, best_of=3, **options)),
        ({"best_of": 3}, engine.generate(PROMPT, n=1, best_of=3, **options)),
        ({}, drawn[:1]),
    ):
        assert command.main([PROMPT, *words, *flags(more), "--json"]) == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["seed"] for each in found] == [each.seed for each in expected]
        assert [each["token_ids"] for each in found] == [each.token_ids for each in expected]
        assert found[0].keys() == expected[0].to_dict().keys()
    del options["logprobs"]
    assert command.main([PROMPT, *flags(options), "--best-of", "3"]) == 0
    assert capsys.readouterr().out == engine.generate(PROMPT, best_of=3, **options).text + "\n"


def test_an_answer_of_the_command_that_is_begun(engine, monkeypatch, capsys):
    monkeypatch.setattr(jaxspec, "load", lambda model, **settings: engine)
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "w8"}]
    expected = engine.generate(messages, continue_final_message=True)
    for more in ([], ["--n", "1"]):
        with submitted(engine) as requests:
            assert command.main([PROMPT, "--continue-final-message", "w8", *more]) == 0
        assert requests[0].prompt == expected.prompt_token_ids
        assert capsys.readouterr().out == expected.text + "\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--n", "0"], "argument --n: must be a whole number, 1 or more, got '0'"),
        (["--n", "2"], "--n has no effect without --temperature: at 0, decoding is greedy"),
        (["--best-of", "2"], "--best-of has no effect without --temperature"),
        (["--temperature", "1", "--n", "3", "--best-of", "2"], "--best-of must be at least 3, got 2"),
        (["--logprobs", "21"], "logprobs must be an integer, 0 to 20, got 21"),
        (["--logprobs-mode", "raw_logprobs"], "--logprobs-mode has no effect without --logprobs"),
        (["--continue-final-message", ""], "the prompt is empty"),
        (["--continue-final-message", "w8", "--raw"], "--continue-final-message has no effect with --raw"),
    ],
)
def test_what_several_answers_cannot_be_is_one_line(words, problem, capsys):
    try:
        status = command.main([PROMPT, *words])
    except SystemExit as error:
        status = error.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line


def test_every_sampling_option_of_a_chat_reaches_the_answer(engine, plain, monkeypatch, capsys):
    monkeypatch.setattr(jaxspec, "load", lambda model, **settings: engine)
    for options in ({}, *(change.options(name, plain) for name, change in OF_CHAT.items())):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
        with submitted(engine) as requests:
            assert chat_command.main(flags(options)) == 0
        assert same(requests[0].generation()) == same(answer_to(engine, PROMPT, options)), options


def test_every_option_of_the_command_about_the_model_reaches_load(monkeypatch, tiny_config, importable):
    head = str(golden_folder("eagle3-residual-normed"))

    def loading(model, **settings):
        raise InterruptedError(model, settings)

    def loads(*words, model=str(tiny_config)):
        monkeypatch.setattr(jaxspec, "load", loading)
        with pytest.raises(InterruptedError) as told:
            command.main([PROMPT, "--model", model, *words])
        return told.value.args

    assert loads(model="smollm2-135m-ngram")[0] == "smollm2-135m-ngram"
    model, settings = loads()
    assert model == str(tiny_config)
    once = {"device": None, "sampling_modes": (SamplingMode.GREEDY,), "batch_size": 1}
    assert settings == {"drafter": {}, **once}
    sampled = required_mode(SamplingParams(temperature=1.0, top_k=3))
    assert loads("--temperature", "1", "--top-k", "3")[1]["sampling_modes"] == (sampled,)
    drafter = {"kind": "eagle3", "source": head, "file": None, "sha256": None}
    assert loads("--drafter", head)[1]["drafter"] == drafter
    assert loads("--drafter", head, "--num-speculative-tokens", "2")[1]["drafter"] == {
        **drafter,
        "num_speculative_tokens": 2,
    }
    assert loads("--num-speculative-tokens", "auto")[1]["drafter"] == {"num_speculative_tokens": "auto"}
    assert loads("--no-speculation")[1]["drafter"] == {"kind": "none"}
    assert loads("--device", "cpu")[1]["device"] == "cpu"
    assert loads("--max-model-len", "64")[1]["max_model_len"] == 64
    assert loads("--n", "3", "--temperature", "1")[1]["batch_size"] == 3
    assert loads("--n", "30", "--temperature", "1")[1]["batch_size"] == 4  # as configured
    assert "imported by --import" not in sys.modules
    loads("--import", str(importable))
    assert "imported by --import" in sys.modules


PROMPTING = ["--chat-template-kwargs", '{"note": "w9"}']
NOTED = {"chat_template_kwargs": {"note": "w9"}}
PROMPTS = {"chat_template_kwargs", "special_tokens_as_text", "sampling_defaults"}
MODEL = {"model", "drafter", "device", "max_model_len", "num_speculative_tokens", "no_speculation", "imports"}


def test_no_option_of_the_commands_is_without_a_test():
    samples = {"n", "continue_final_message"}
    own = {"prompt", "raw", "best_of", "json", *samples}
    assert_complete("jaxspec", arguments(command.main), own, FLAGS, MODEL, PROMPTS)
    # `--system` is tested with the chat; both commands load by one function.
    assert_complete("jaxspec chat", arguments(chat_command.main), {"system"}, OF_CHAT, MODEL, PROMPTS)
    own = {"raw", "resume", *samples}
    assert_complete("jaxspec batch", arguments(batch_command.main), own, FLAGS, BATCH, PROMPTS)


ROWS = [{"id": f"row {i}", "prompt": PROMPT} for i in range(3)]


@pytest.fixture
def batch(tmp_path, tiny_config, monkeypatch):
    """Runs `jaxspec batch` over three rows, into a new output each time."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    outputs = iter(tmp_path / f"out{i}.jsonl" for i in range(100))
    monkeypatch.setattr(batch_job, "provenance", lambda *told, **more: {})  # asks git each time

    def run(*words):
        output = next(outputs)
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
        return output, batch_command.main([str(tiny_config), *files, *map(str, words)])

    return run


def test_every_sampling_option_of_a_batch_reaches_the_answers(engine, plain, batch, monkeypatch):
    monkeypatch.setattr(batch_job, "load", lambda config, **settings: engine)
    cases = [({}, True), *((change.options(name, plain), False) for name, change in FLAGS.items())]
    for options, raw in cases:
        with submitted(engine) as requests:
            output, status = batch("--limit", 1, *flags(options), *(["--raw"] if raw else []))
        assert status == 0
        if "seed" in options:
            options = {**options, "seed": row_seed(options["seed"], "row 0", 0)}
        expected = answer_to(engine, PROMPT, options, raw=raw)
        assert same(requests[0].generation()) == same(expected), options
        (row,) = map(json.loads, output.read_text("utf-8").splitlines())
        assert (row["text"], row["token_ids"]) == (expected.text, expected.token_ids)


class Devices:
    """A machine with as many devices as one wants."""

    backend, description = "cpu", "none"

    @classmethod
    def find(cls):
        return cls()

    def share(self, replicas, tensor_parallel):
        return [{"devices": str(tensor_parallel)}] * replicas


class Asked(BaseException):
    """What `jaxspec batch` was about to run."""


@pytest.fixture(params=["one engine", "replicas", "ray"])
def asked(request, batch, monkeypatch):
    """Runs `jaxspec batch` up to where its work begins; returns what that is given, in one form."""
    words = {"one engine": [], "replicas": ["--replicas", "2"], "ray": ["--ray", "here"]}[request.param]

    def batch_run(engine, rows, params, *, raw, keep_order):
        config, settings = engine
        raise Asked(
            {"config": config, **settings, "rows": len(list(rows)), "params": params, "raw": raw}
            | {"keep_order": keep_order, "imports": (), "replicas": None, "address": None}
        )

    def replica_run(load, start, rows, params, *, imports, raw, keep_order, note):
        assert load.func is fake_load
        assert load.keywords.pop("progress") is False
        kinds, places = {each.func for each in start}, [each.args[0] for each in start]
        assert kinds == {RayReplica if request.param == "ray" else ProcessReplica}
        assert places[0]["devices"] == str(load.keywords.get("tensor_parallel", 1))
        raise Asked(
            {"config": load.args[0], **load.keywords, "rows": len(list(rows)), "params": params, "raw": raw}
            | {"keep_order": keep_order, "imports": imports, "replicas": len(start)}
            | {"address": places[0].get("address")}
        )

    def share_cluster(engines, tensor_parallel):
        place = {"devices": str(tensor_parallel), "address": connected.pop()}
        return Engines("cpu", "none", [partial(RayReplica, place)] * (engines or 2))

    def fake_load(config, **settings):
        return config, settings

    connected = []
    monkeypatch.setattr(batch_job, "load", fake_load)
    monkeypatch.setattr(batch_job, "BatchRun", batch_run)
    monkeypatch.setattr(batch_job, "HostDevices", Devices)
    monkeypatch.setattr(batch_job, "choose_devices", lambda device, count: jax.devices() * count)
    monkeypatch.setattr(batch_job, "ReplicaRun", replica_run)
    monkeypatch.setattr(ray, "connect", connected.append)
    monkeypatch.setattr(ray, "share_cluster", share_cluster)

    def run(*more):
        with pytest.raises(Asked) as told:
            batch(*words, *more)
        return told.value.args[0]

    run.way = request.param
    return run


def test_every_option_of_a_batch_reaches_its_engines_in_each_way(asked, tiny_config, importable):
    default = asked()
    assert default["config"] == str(tiny_config)
    assert default["rows"] == 3
    assert default["drafter"] == {}
    assert (default["raw"], default["keep_order"], tuple(default["imports"])) == (False, False, ())
    assert default["replicas"] == (None if asked.way == "one engine" else 2)
    assert default["address"] == ("here" if asked.way == "ray" else None)
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.3, "min_p": 0.2, "seed": 3}
    options |= {"max_new_tokens": 7, "stop": ["w9", "w8"], "stop_token_ids": [7, 8], "ignore_eos": True}
    options |= {"logprobs": 2, "logprobs_mode": "processed_logprobs"}
    options |= {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5}
    options |= {
        "logit_bias": {7: 2.0},
        "bad_words": ["w11", "w12"],
        "min_tokens": 2,
        "no_repeat_ngram_size": 3,
        "regex": "w[0-9]+",
    }
    instead = {"choice": ["w9", "w10 w11"], "json_schema": {"type": "null"}}  # of the regex
    assert {*options, *instead} == set(FLAGS)
    for name, value in instead.items():
        assert asked(*flags({name: value}))["params"].grammar == SamplingParams(**{name: value}).grammar
    engines = {"tensor_parallel": 2, **({"replicas": 3} if asked.way != "one engine" else {})}
    numbers = {"limit": 2, "batch_size": 3, "max_model_len": 96, "num_speculative_tokens": 5, **engines}
    found = asked("--raw", "--keep-order", "--import", importable, *flags({**options, **numbers}))
    assert found["params"] == SamplingParams(**options)
    assert found["sampling_modes"] == (required_mode(SamplingParams(**options)),)
    assert (found["raw"], found["keep_order"]) == (True, True)
    assert (found["rows"], found["batch_size"], found["max_model_len"]) == (2, 3, 96)
    assert {name: found[name] for name in engines} == engines
    assert found["drafter"] == {"num_speculative_tokens": 5}
    assert tuple(found["imports"]) == (str(importable),) or asked.way == "one engine"
    assert "imported by --import" in sys.modules
    assert asked("--no-speculation")["drafter"] == {"kind": "none"}
    if asked.way == "ray":
        assert asked("--ray")["address"] is None
    if asked.way == "one engine":  # others have devices of their own, see tests/test_devices.py
        assert default["device"] is None
        assert asked("--device", "cpu:0")["device"] == "cpu:0"


# See the test above, and for `resume` those of scripts/test_generate_batch.py.
BATCH = {
    "config",
    "input",
    "output",
    "keep_order",
    "limit",
    "batch_size",
    "max_model_len",
    "replicas",
    "tensor_parallel",
    "prompt_key",
    "keep_columns",
    "ray",
    "summary",
    "num_speculative_tokens",
    "no_speculation",
    "device",
    "imports",
}


def test_every_option_about_the_rows_of_a_batch_reaches_them(engine, batch, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(batch_job, "load", lambda config, **settings: engine)
    line = {"q": PROMPT, "label": 1, "source": 2}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    for kept, columns in (((), {"label": 1, "source": 2}), (("label",), {"label": 1})):
        with submitted(engine) as requests:
            output, status = batch("--prompt-key", "q", "--keep-columns", *kept, *PROMPTING)
        (row,) = map(json.loads, output.read_text("utf-8").splitlines())
        assert status == 0
        assert columns.items() <= row.items()
        assert "source" in columns or "source" not in row
        assert requests[0].prompt == answer_to(engine, PROMPT, {}, **NOTED).prompt_token_ids
    (tmp_path / "in.jsonl").write_text('{"prompt": "w6 </s>"}\n', "utf-8")
    assert batch("--special-tokens-as-text")[1] == 1
    assert "special_tokens_as_text: this tokenizer has no other tokens for '</s>'" in capsys.readouterr().err
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "w8"}]
    own = {"messages": messages, "n": 1, "continue_final_message": False}
    rows = [{"messages": messages}, own]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    output, status = batch("--n", 2, "--temperature", 1, "--continue-final-message", "--keep-order")
    assert status == 0
    found = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [len(row["samples"]) for row in found] == [2, 1]
    begun = len(engine.generate(messages, continue_final_message=True).prompt_token_ids)
    whole = len(engine.generate(messages).prompt_token_ids)
    assert [row["prompt_tokens"] for row in found] == [begun, whole]


@pytest.mark.parametrize("main", [command.main, chat_command.main], ids=["jaxspec", "chat"])
def test_the_options_about_prompts_reach_the_request(main, engine, monkeypatch, capsys):
    monkeypatch.setattr(jaxspec, "load", lambda model, **settings: engine)

    def run(prompt, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompt + "\n"))
        with submitted(engine) as requests:
            main([*([prompt] if main is command.main else []), *words])
        return requests, capsys.readouterr().err

    ((request,), _) = run(PROMPT, *PROMPTING)
    assert request.prompt == answer_to(engine, PROMPT, {}, **NOTED).prompt_token_ids
    requests, said = run("w6 </s>", "--special-tokens-as-text")
    assert not requests
    assert "this tokenizer has no other tokens for '</s>'" in said


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "not JSON: "), ("[1]", r"must be a JSON object, got '\[1\]'")]
)
def test_arguments_of_the_template_that_are_no_object_are_one_line(text, problem, capsys):
    with pytest.raises(SystemExit):
        command.main([PROMPT, "--chat-template-kwargs", text])
    assert re.search(f"error: argument --chat-template-kwargs: {problem}", capsys.readouterr().err)


def test_the_models_own_sampling_is_taken_where_it_is_asked_for(
    engine, plain, monkeypatch, tiny_config, capsys
):
    """And gives way to what is asked for beside it."""
    monkeypatch.setattr(jaxspec, "load", lambda model, **settings: engine)
    assert command.main([PROMPT, "--model", str(tiny_config), "--sampling-defaults"]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"error: --sampling-defaults: {tiny_config} has no generation_config.json that recommends any\n"
    )
    recommended = {"temperature": 0.5, "top_k": 4, "max_new_tokens": 1, "eos_token_id": 2}
    path = tiny_config.parent / "model" / "generation_config.json"
    path.write_text(json.dumps(recommended), "utf-8")
    try:
        for words, expected in (
            ([], {}),
            (["--sampling-defaults"], {"temperature": 0.5, "top_k": 4}),
            (["--sampling-defaults", "--top-k", "0", "--min-p", "0.1"], {"temperature": 0.5, "min_p": 0.1}),
            (["--sampling-defaults", "--temperature", "0"], {"top_k": 4}),
        ):
            with submitted(engine) as requests:
                assert command.main([PROMPT, "--model", str(tiny_config), *words]) == 0
            assert requests[0].params == SamplingParams(**expected)
    finally:
        path.unlink()


def test_a_summary_is_written_where_it_is_wanted(engine, batch, monkeypatch, tmp_path):
    monkeypatch.setattr(batch_job, "load", lambda config, **settings: engine)
    assert batch("--summary", tmp_path / "summary.json")[1] == 0
    assert json.loads((tmp_path / "summary.json").read_text("utf-8"))["answered"] == 3
