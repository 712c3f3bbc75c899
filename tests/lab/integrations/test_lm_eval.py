"""The harness's tasks on an engine: with the real package and against its own `hf`, where it is installed."""

import importlib
import json
import random
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import write_target
from tiny_tokenizers import byte_level

from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf
from jaxspec.installation import install_command

LENGTH = 40
SIZES = {"page_size": 8, "prefill_chunk": 8, "slot_sizes": (), "progress": False}
TEXTS = ["hello world", "he hell o w", "hey, hello! " * 6, "<s>a text that begins", "x", "é über", ""]
TASK = {
    "task": "local",
    "output_type": "multiple_choice",
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
}
ROWS = [
    {"question": text, "choices": ["hell", "o w", "hey"], "answer": i % 3} for i, text in enumerate("abcd")
]


@pytest.fixture(scope="module")
def lm_eval():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lm_eval", reason="needs the extra lm-eval, lm_eval")
        from jaxspec.lab.integrations import lm_eval

    return lm_eval


@pytest.fixture(scope="module", params=[True, False], ids=["a first token", "none"])
def folder(request, tmp_path_factory):
    """A checkpoint whose tokenizer puts `<s>` in front of a text, or knows no such token."""
    bos = {} if request.param else {"ggml__bos_token_id": None}
    values = byte_level(ggml__add_bos_token=request.param, **bos)
    size = len(values["tokenizer.ggml.tokens"])
    folder = write_target(tmp_path_factory.mktemp("lm_eval") / "model", vocab_size=size, eos_token_id=2)
    tokenizer_from_gguf(values, "file").save(folder)
    return folder


@pytest.fixture(scope="module")
def model(lm_eval, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval, "_AT_ONCE", 3)
        model = lm_eval.JaxspecLM(folder, batch_size=4, max_length=LENGTH, **SIZES)
        yield model
        model.engine.close()


@pytest.fixture(scope="module")
def hf(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch", "transformers"):
            pytest.importorskip(name, reason="the harness's own model needs lm_eval[hf]")
        from lm_eval.models.huggingface import HFLM

        # In a larger batch, `<s>` in front of the first text alone decides whether texts get another one.
        return HFLM(str(folder), device="cpu", dtype="float32", max_length=LENGTH, batch_size=1)


def asked(*arguments):
    return [SimpleNamespace(args=args, task_name="local") for args in arguments]


@pytest.mark.filterwarnings("ignore")
def test_log_likelihoods_equal_those_of_hf(model, hf):
    pairs = [(context, continuation) for context in TEXTS for continuation in ("hell", " w", " hey, é")]
    pairs += [("hello  ", "world"), ("", "</s>he"), ("a", "b" * (LENGTH - 2)), ("a", "b" * LENGTH)]
    requests = asked(*pairs)
    found, expected = model.loglikelihood(requests), hf.loglikelihood(requests)
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert max(len(model.tok_encode(text)) for text in TEXTS) > LENGTH
    with pytest.raises(ValueError, match=rf"a continuation has {LENGTH + 1} tokens: max_length is {LENGTH}"):
        model.loglikelihood(asked(("a", "b" * (LENGTH + 1))))


@pytest.mark.filterwarnings("ignore")
def test_what_greedy_decoding_says_is_the_likeliest(model, hf):
    context = model.tok_encode("hello")
    said = model.engine.generate(context, max_new_tokens=4).token_ids
    others = [[token ^ (i == place) for i, token in enumerate(said)] for place in range(4)]
    tokens = [(None, context, scored) for scored in [said, *others]]
    found = model._loglikelihood_tokens(tokens)
    assert [greedy for _, greedy in found] == [True, False, False, False, False]
    assert [greedy for _, greedy in hf._loglikelihood_tokens(tokens)] == [greedy for _, greedy in found]


@pytest.mark.filterwarnings("ignore")
def test_those_of_whole_texts_do_too(model, hf):
    requests = asked(*((text,) for text in [*TEXTS, "hello " * 40]))
    found, expected = model.loglikelihood_rolling(requests), hf.loglikelihood_rolling(requests)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert len(set(found)) == len(found)


@pytest.mark.filterwarnings("ignore")
def test_answers_equal_those_of_hf(model, hf):
    whole = model.generate_until(asked(*((text, {"max_gen_toks": 20}) for text in TEXTS if text)))
    assert all(whole)
    requests = asked(
        *((text, {"max_gen_toks": 20}) for text in TEXTS if text),
        *(
            (text, {"until": [answer[4:6], "no"], "max_gen_toks": 20})
            for text, answer in zip(filter(None, TEXTS), whole, strict=True)
        ),
        ("hello", {"until": whole[0][2], "max_new_tokens": 12, "do_sample": False, "temperature": 0.0}),
    )
    found = model.generate_until(requests)
    assert found == hf.generate_until(requests)
    assert found[len(whole)] == whole[0][:4]
    assert len({len(model.tok_encode(text)) for text in found}) > 2


@pytest.mark.filterwarnings("ignore")
def test_a_conversation_equals_that_of_hf(model, hf):
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hey"}]
    answer = {"role": "assistant", "content": "hello"}
    chat = model.apply_chat_template(turns)
    assert chat == hf.apply_chat_template(turns)
    assert chat.endswith("assistant: ")
    begun = model.apply_chat_template([*turns, answer], add_generation_prompt=False)
    assert begun == hf.apply_chat_template([*turns, answer], add_generation_prompt=False)
    assert begun.endswith("hello")
    for text in [chat, *TEXTS]:
        assert model.tok_encode(text) == hf.tok_encode(text)
        assert model.tok_encode(text, add_special_tokens=False) == hf.tok_encode(
            text, add_special_tokens=False
        )
    assert model.chat_template(True) == hf.chat_template(True)


@pytest.mark.filterwarnings("ignore")
def test_samples_are_as_the_harness_seeds_them(model):
    sampled = asked(*[("hello", {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0})] * 4)

    def answers(seed, requests=sampled):
        random.seed(seed)
        return model.generate_until(requests)

    assert answers(1) == answers(1) != answers(2)
    assert len(set(answers(1))) > 1
    (cold,) = answers(1, asked(("hello", {"max_gen_toks": 8, "temperature": 1e-4})))
    assert [cold] == model.generate_until(asked(("hello", {"max_gen_toks": 8})))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 4, "max_gen_toks": 2}, "unknown sampling parameter 'num_beams'"),
        ({"max_gen_toks": LENGTH}, f"max_gen_toks must be 1 to {LENGTH - 1}, got {LENGTH}"),
        ({}, f"max_gen_toks must be 1 to {LENGTH - 1}, got 256"),
        ({"temperature": -1.0, "max_gen_toks": 2}, "temperature must be "),
    ],
)
def test_what_cannot_be_asked_is_one_line(model, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        model.generate_until(asked(("hello", arguments)))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_an_engine_is_taken_as_it_is(lm_eval, model, monkeypatch):
    again = lm_eval.JaxspecLM(model.engine, batch_size="auto")
    assert (again.max_length, model.engine.max_model_len) == (LENGTH, LENGTH + 1)
    assert again.tokenizer_name == model.tokenizer_name
    thinking = lm_eval.JaxspecLM(model.engine, chat_template_args={"enable_thinking": True})
    assert thinking.tokenizer_name != model.tokenizer_name
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ enable_thinking }}")
    assert thinking.apply_chat_template([{"role": "user", "content": "hey"}]) == "True"
    with pytest.raises(ValueError, match=r"batch_size: the model is an engine, which is loaded already"):
        lm_eval.JaxspecLM(model.engine, batch_size=2)


def test_a_model_without_a_tokenizer_is_refused(lm_eval, tmp_path):
    folder = write_target(tmp_path / "model")
    with pytest.raises(ValueError, match=r"tasks of lm_eval are texts, and the checkpoint has no tokenizer"):
        lm_eval.JaxspecLM(folder, batch_size=1, max_length=LENGTH, **SIZES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folder", [True], indirect=True, ids=["a first token"])
def test_the_command_runs_a_local_task(lm_eval, model, folder, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(rows)}}}
    (tmp_path / "local.yaml").write_text(json.dumps(task), "utf-8")  # JSON is YAML
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = {"pretrained": str(folder), "max_length": LENGTH, "page_size": 8, "progress": False}
    command = [sys.executable, "-m", "jaxspec.lab.integrations.lm_eval", "run", "--model", "jaxspec"]
    command += ["--model_args", json.dumps(given), "--tasks", "local", "--include_path", str(tmp_path)]
    command += ["--batch_size", "4", "--output_path", str(tmp_path / "results.json"), "--log_samples"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("samples_local*.jsonl")
    samples = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    found = [float(x) for sample in samples for ((x, _),) in sample["resps"]]
    pairs = [(row["question"], " " + choice) for row in ROWS for choice in row["choices"]]
    np.testing.assert_allclose(found, [x for x, _ in model.loglikelihood(asked(*pairs))], atol=1e-4)


def test_a_missing_package_is_one_line(monkeypatch):
    for name in ["lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jaxspec.lab.integrations.lm_eval", raising=False)
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module("jaxspec.lab.integrations.lm_eval")
    assert str(error.value) == f"this needs lm_eval, which is not installed: {install_command('lm-eval')}"
