import asyncio

import numpy as np
import pytest
from tiny_tokenizers import byte_level

import jaxspec
from jaxspec import AsyncEngine, SamplingParams
from jaxspec.engine.api.prompts import encode_prompt
from jaxspec.files import CheckpointError
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf
from jaxspec.service.batch import BatchRun, Row

ROOM = 2048


class CountingBackend:
    """A backend that counts the characters that it reads."""

    def __init__(self, backend):
        self._backend = backend
        self.num_read = 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode(self, text, **options):
        self.num_read += len(text)
        return self._backend.encode(text, **options)


@pytest.fixture
def tokenizer():
    tokenizer = tokenizer_from_gguf(byte_level(), "file")
    tokenizer.backend = CountingBackend(tokenizer.backend)
    return tokenizer


def encode(tokenizer, prompt, *, raw=False, vocab_size=267, **kwargs):
    return encode_prompt(prompt, tokenizer, raw=raw, vocab_size=vocab_size, max_tokens=ROOM, **kwargs)


TEXT = "hello world " * 500_000
LONG = {
    "a user's turn": (TEXT, False),
    "raw": (TEXT, True),
    "messages": ([{"role": "user", "content": "hi"}, {"role": "user", "content": TEXT}], False),
    "many messages": ([{"role": "user", "content": TEXT[:6000]}] * 1000, False),
}


@pytest.mark.parametrize("form", LONG)
def test_a_text_far_too_long_is_refused_before_it_is_read(tokenizer, form):
    prompt, raw = LONG[form]
    with pytest.raises(CheckpointError, match=r"text of 60000\d\d characters makes more than 2048 tokens"):
        encode(tokenizer, prompt, raw=raw)
    assert tokenizer.backend.num_read < 20 * ROOM


WAYS = {
    "generate": lambda engine, text: engine.generate(["w6", text]),
    "raw": lambda engine, text: engine.generate(text, raw=True),
    "stream": lambda engine, text: engine.stream(text),
    "messages": lambda engine, text: engine.generate([{"role": "user", "content": text}]),
    "async": lambda engine, text: asyncio.run(AsyncEngine(engine).generate(text)),
    "inspection": lambda engine, text: jaxspec.inspect_steps(engine, text),
    "a row": lambda engine, text: next(iter(BatchRun(engine, [Row("", 0, text)], SamplingParams()))),
    "a row's turn": lambda engine, text: next(
        iter(BatchRun(engine, [Row("", 0, None, (text,))], SamplingParams()))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_far_too_long_is_refused_whichever_way_it_comes(tiny_engine, monkeypatch, way):
    tokenizer, read = tiny_engine.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **k: read.append(len(text)) or encode(text, **k))
    try:
        problem = str(WAYS[way](tiny_engine, "w6 " * 1_000_000))
    except ValueError as error:
        problem = str(error)
    assert "text of 3000000 characters makes more than 128 tokens" in problem
    assert sum(read) < 20_000


def test_a_template_that_repeats_a_text_is_refused_as_one_that_is_too_long(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content * 1000 }}"
    with pytest.raises(CheckpointError, match="text of 6000000 characters makes more than 2048 tokens"):
        encode(tokenizer, "hello " * 1000)
    assert tokenizer.backend.num_read < 20 * ROOM


def test_an_argument_that_is_too_long_is_refused_as_a_text(tokenizer):
    tokenizer.chat_template = "{{ documents }}"
    with pytest.raises(CheckpointError, match="text of 6000000 characters makes more than 2048 tokens"):
        encode(tokenizer, "hi", chat_template_kwargs={"documents": TEXT})
    assert tokenizer.backend.num_read < 20 * ROOM


@pytest.mark.parametrize("bos", ["<|begin|>", ""])
def test_a_raw_prompt_has_one_beginning_of_text(bos):
    """Whether its text brings the token or not."""
    values = byte_level()
    values["tokenizer.ggml.tokens"].append("<|begin|>")
    values["tokenizer.ggml.token_type"].append(3)
    values |= {"tokenizer.ggml.bos_token_id": 267, "tokenizer.ggml.add_bos_token": True}
    tokenizer = tokenizer_from_gguf(values, "file")
    ids = encode(tokenizer, f"{bos}hello", raw=True, vocab_size=268)
    assert ids.count(267) == 1
    assert ids == encode(tokenizer, "hello", raw=True, vocab_size=268)


def test_what_no_prompt_begins_with_may_stand_twice(tokenizer):
    """A tokenizer that prepends nothing takes nothing away."""
    ids = encode(tokenizer, "hh", raw=True)
    assert len(ids) == 2
    assert ids[0] == ids[1]


def test_arguments_reach_the_chat_template(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    assert tokenizer.decode(encode(tokenizer, "hi", chat_template_kwargs={"shout": True})) == "hi!"
    assert tokenizer.decode(encode(tokenizer, "hi", chat_template_kwargs={"shout": False})) == "hi"


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        ([5, 6], {"chat_template_kwargs": {"shout": True}}, "no chat template applies to token ids"),
        (
            "hi",
            {"chat_template_kwargs": {"shout": True}, "raw": True},
            "chat template applies to raw text",
        ),
        ("hi", {"chat_template_kwargs": {"shuot": True}}, "does not read 'shuot'; its arguments are: shout"),
        ("hi", {"chat_template_kwargs": {"messages": []}}, "'messages' cannot be set"),
        ("hi", {"chat_template_kwargs": [1]}, "must be a mapping from names to values"),
        ("hi", {"chat_template_kwargs": {"shout": {1, 2}}}, "chat_template_kwargs cannot be written as JSON"),
        ([{"role": "user", "content": "hi"}], {"raw": True}, "raw: chat messages are text only by"),
        (
            [{"role": "usr", "content": "hi"}],
            {},
            r"messages\[0\]\['role'\]: the chat template knows no role",
        ),
    ],
)
def test_what_would_have_no_effect_is_one_line(tokenizer, prompt, options, problem):
    tokenizer.chat_template = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    with pytest.raises(ValueError, match=problem) as raised:
        encode(tokenizer, prompt, **options)
    assert "\n" not in str(raised.value)


def test_a_role_that_the_template_names_is_known(tokenizer):
    tokenizer.chat_template = "{% if messages[0].role == 'critic' %}bad{% endif %}"
    assert tokenizer.decode(encode(tokenizer, [{"role": "critic", "content": "hi"}])) == "bad"


def test_a_text_that_may_fit_is_read_once(tokenizer):
    text = "hello" * ROOM
    assert len(encode(tokenizer, text, raw=True)) == ROOM
    assert tokenizer.backend.num_read == len(text)


def test_a_long_text_of_few_tokens_fits(tokenizer):
    values = byte_level()
    values["tokenizer.ggml.tokens"].append("h" * 50)
    values["tokenizer.ggml.token_type"].append(4)
    tokenizer = tokenizer_from_gguf(values, "file")
    assert encode(tokenizer, "h" * 50 * ROOM, raw=True, vocab_size=268) == [267] * ROOM


def test_a_tokenizer_with_more_tokens_than_the_model_is_noticed(tokenizer):
    with pytest.raises(ValueError, match="prompt: token id 266 is outside the vocabulary of 266"):
        encode(tokenizer_from_gguf(byte_level("llama-bpe"), "file"), "hey", raw=True, vocab_size=266)


@pytest.mark.parametrize(
    "prompt", [[5, np.int32(6), np.uint8(7)], np.array([5, 6, 7]), (5, 6, 7), range(5, 8)]
)
def test_token_ids_of_any_integer_type_become_ints(prompt):
    ids = encode(None, prompt)
    assert ids == [5, 6, 7]
    assert set(map(type, ids)) == {int}


@pytest.mark.parametrize(
    "prompt", [[5, True], [5, "w6"], [5, {"role": "user", "content": "w6"}], [5, 6.0], [[5]]]
)
def test_what_is_not_a_list_of_token_ids_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt must be a string, a list of token ids"):
        encode(None, prompt)


@pytest.mark.parametrize(
    ("prompt", "outside"), [([5, -1], -1), ([5, -1, 300], -1), ([300, 5, -1], 300), ([267], 267)]
)
def test_the_first_id_outside_the_vocabulary_is_named(prompt, outside):
    with pytest.raises(ValueError, match=f"token id {outside} is outside the vocabulary of 267"):
        encode(None, prompt)


def begun(text, *, role="assistant"):
    return [{"role": "user", "content": "hello"}, {"role": role, "content": text}]


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content SHOWN }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("shown", "text", "ends"),
    [
        ("", "he said ", "he said "),
        ("| trim", "he said ", "he said"),
        ("", "", ""),
        ("| trim", "[end]", "[end]"),
    ],
)
def test_an_answer_that_was_begun_goes_on_where_it_ends(tokenizer, shown, text, ends):
    """The end is trimmed where the template trims, as transformers does."""
    tokenizer.chat_template = CHAT.replace("SHOWN", shown)
    ids = encode(tokenizer, begun(text), continue_final_message=True)
    assert tokenizer.decode(ids) == f"[user]hello[end][assistant]{ends}"
    assert tokenizer.decode(encode(tokenizer, begun(text))).endswith("[end][assistant]")
    guarded = encode(tokenizer, begun(text), continue_final_message=True, special_tokens_as_text=True)
    assert guarded == ids


@pytest.mark.parametrize(
    ("prompt", "template", "problem"),
    [
        (begun("hi", role="user"), CHAT.replace("SHOWN", ""), "the last message is of the user, no answer"),
        (begun("hi"), "{{ messages[0].content }}", "the chat template leaves out the last message"),
        ("hi", "{{ messages[0].content }}", "only chat messages end with an answer that can go on"),
        ([5, 6], "", "only chat messages end with an answer that can go on"),
    ],
)
def test_what_cannot_go_on_is_one_line(tokenizer, prompt, template, problem):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"continue_final_message: {problem}"):
        encode(tokenizer, prompt, continue_final_message=True)
