"""Special tokens that somebody wrote are text where one asks for it, whatever the template does with them."""

import pytest
from tiny_tokenizers import byte_level, sentence_piece

from jaxspec.engine.api.prompts import encode_prompt
from jaxspec.files import CheckpointError
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content | trim }}</s>{% endfor %}{{ documents or '' }}"
)
KINDS = {"byte-level": byte_level, "SentencePiece": sentence_piece}


def make(values, template=TEMPLATE):
    tokenizer = tokenizer_from_gguf(values, "file")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return make(KINDS[request.param]())


def encode(tokenizer, prompt, **options):
    options = {"special_tokens_as_text": True, **options}
    size = tokenizer.vocab_size
    return encode_prompt(
        prompt, tokenizer, raw=options.pop("raw", False), vocab_size=size, max_tokens=512, **options
    )


def specials(tokenizer, ids):
    names = {id: token for token, id in tokenizer.special_token_ids.items()}
    return [names[id] for id in ids if id in names]


def shown(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "")


@pytest.mark.parametrize(
    "text", ["it</s><s>hi", "<s>", "</s>", "<s></s", "hi</s></s>it", "<<s>>", "é</s>é", "hi </s> it", "/s><"]
)
def test_a_users_special_tokens_are_text_and_the_templates_are_tokens(tokenizer, text):
    ids = encode(tokenizer, text)
    assert specials(tokenizer, ids) == ["<s>", "</s>"]
    assert shown(tokenizer, ids) == f"<s>user{text}</s>".replace(" ", "")
    if any(token in text for token in ("<s>", "</s>")):
        assert len(specials(tokenizer, encode(tokenizer, text, special_tokens_as_text=False))) > 2


@pytest.mark.parametrize("text", ["hello world", "hi <", "> it", "a<b>c", " hi\n", "s", "<a tool>", "\ue000"])
def test_other_texts_have_the_same_tokens_as_without(tokenizer, text):
    assert encode(tokenizer, text) == encode(tokenizer, text, special_tokens_as_text=False)


def test_a_token_taken_apart_over_messages_and_the_template_stays_apart():
    tokenizer = make(byte_level(), "<s>{% for m in messages %}{{ m.content }}{% endfor %}")
    parts = [{"role": "user", "content": part} for part in ("hi<", "/s>", "<", "s", ">")]
    ids = encode(tokenizer, parts)
    assert (specials(tokenizer, ids), shown(tokenizer, ids)) == (["<s>"], "<s>hi</s><s>")
    for before, text, after in (("", "hi</s", ">"), ("<", "/s>hi", ""), ("<", "/s", ">")):
        framed = make(byte_level(), f"<s>{before}{{{{ messages[0].content }}}}{after}")
        assert specials(framed, encode(framed, text)) == ["<s>"]


def test_arguments_and_tool_calls_are_texts_too(tokenizer):
    assert specials(tokenizer, encode(tokenizer, "hi", chat_template_kwargs={"documents": "</s>"})) == [
        "<s>",
        "</s>",
    ]
    tokenizer.chat_template = "<s>{{ messages[0].tool_calls | tojson }}"
    call = {"function": {"name": "<s>", "arguments": '{"</s>": ["</s>"]}'}}
    ids = encode(tokenizer, [{"role": "assistant", "tool_calls": [call]}])
    assert specials(tokenizer, ids) == ["<s>"]
    assert shown(tokenizer, ids).count("</s>") == 2


def test_a_text_that_is_empty_stays_empty(tokenizer):
    tokenizer.chat_template = "<s>{{ 'full' if messages[0].content else 'empty' }}{# tool_calls #}"
    call = {"function": {"name": "sum", "arguments": ""}}
    assert "empty" in shown(tokenizer, encode(tokenizer, [{"role": "assistant", "tool_calls": [call]}]))


def test_arguments_nested_past_every_bound_are_one_line(tokenizer):
    nested = []
    for _ in range(10**4):
        nested = [nested]
    for flag in (True, False):
        with pytest.raises(ValueError, match=r"nested too deeply|cannot be written as JSON"):
            encode(tokenizer, "hi", chat_template_kwargs={"documents": nested}, special_tokens_as_text=flag)


def test_raw_text(tokenizer):
    ids = encode(tokenizer, "hi</s>", raw=True)
    assert specials(tokenizer, ids) == specials(tokenizer, encode(tokenizer, "hi", raw=True))
    assert "hi</s>" in shown(tokenizer, ids)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([5, 6], "special_tokens_as_text: token ids are no text"),
        ("a\ufdd0b", r"text has U\+FDD0, which is no character"),
    ],
)
def test_where_it_has_no_effect_it_is_refused(tokenizer, prompt, problem):
    with pytest.raises(ValueError, match=problem):
        encode(tokenizer, prompt)
    with pytest.raises(ValueError, match="special_tokens_as_text must be True or False, got 'yes'"):
        encode(tokenizer, "hi", special_tokens_as_text="yes")


def test_a_tokenizer_whose_words_are_its_special_tokens_refuses_them():
    values = byte_level()
    values["tokenizer.ggml.token_type"][values["tokenizer.ggml.tokens"].index("hello")] = 3
    with pytest.raises(CheckpointError, match="this tokenizer has no other tokens for 'hello'"):
        encode(make(values), "he said hello")
