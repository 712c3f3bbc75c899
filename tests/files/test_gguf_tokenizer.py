import pytest
from tiny_tokenizers import byte_level, sentence_piece
from tokenizers import pre_tokenizers

from jaxspec.files import CheckpointError
from jaxspec.files.gguf.pre_tokenizers import PRE_TOKENIZERS
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf

TEXT = "I'LL say: hello w0rld  2024½\r\n\n don't…  ÉTÉ été 東京 🎉🏽 x²+y  "


def words(pre, text):
    backend = tokenizer_from_gguf(byte_level(pre), "file").backend
    return [text[a:b] for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_round_trip(pre):
    tokenizer = tokenizer_from_gguf(byte_level(pre), "file")
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["A", "'ll", " ", " b", "'", "LL", " 12345", ".!"]),
        ("olmo", ["A", "'ll", " ", " b", "'", "LL", " 12345", ".!"]),
        ("smollm", ["A", "'ll", " ", " b", "'", "LL", " ", "1", "2", "3", "4", "5", ".!"]),
        ("refact", ["A", "'ll", " ", " b", "'", "LL", " ", "1", "2", "3", "4", "5", ".!"]),
        ("llama-bpe", ["A", "'ll", " ", " b", "'LL", " ", "123", "45", ".!"]),
        ("qwen2", ["A", "'ll", " ", " b", "'LL", " ", "1", "2", "3", "4", "5", ".!"]),
        ("glm4", ["A", "'ll", " ", " b", "'LL", " ", "123", "45", ".!"]),
        ("dbrx", ["A", "'ll", " ", " b", "'LL", " ", "123", "45", ".!"]),
        ("tekken", ["A", "'ll", " ", " b", "'LL", " ", "1", "2", "3", "4", "5", ".!"]),
        ("gpt-4o", ["A'll", " ", " b'LL", " ", "123", "45", ".!"]),
        ("deepseek-v3", ["A", "'ll", " ", " b", "'LL", " ", "123", "45", ".!"]),
        ("deepseek-coder", ["A", "'", "ll", " ", " b", "'", "LL", " ", "1", "2", "3", "4", "5", ".!"]),
        ("default", ["A", "'", "ll", " ", " b", "'", "LL", " ", "123", "45", ".!"]),
    ],
)
def test_pre_tokenizers_cut_words_as_their_models_do(pre, expected):
    assert words(pre, "A'll  b'LL 12345.!") == expected


@pytest.mark.parametrize(("pre", "count"), [("qwen2", 4), ("qwen35", 1)])
def test_marks_belong_to_the_words_of_qwen_3_5(pre, count):
    assert len(words(pre, "हिन्दी")) == count


def test_smollm_equals_digits_then_gpt2():
    reference = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = tokenizer_from_gguf(byte_level("smollm"), "file").backend.pre_tokenizer
    assert ours.pre_tokenize_str(TEXT) == reference.pre_tokenize_str(TEXT)


def test_control_tokens_in_text_become_ids():
    tokenizer = tokenizer_from_gguf(byte_level(), "file")
    ids = tokenizer.encode("<s>hello</s><a tool>")
    assert (ids[0], ids[-2], ids[-1]) == (1, 2, 3)
    assert tokenizer.decode(ids) == "hello<a tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello</s><a tool>"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-4o", ["camel", "Case", "HTTPServer's", " Été", "'東京", " ///\n", "x"]),
        ("tekken", ["camel", "Case", "HTTPServer", "'s", " Été", "'東京", " ///\n", "x"]),
        ("qwen2", ["camelCaseHTTPServer", "'s", " Été", "'東京", " ///\n", "x"]),
        ("deepseek-v3", ["camelCaseHTTPServer", "'s", " Été", "'", "東京", " ///\n", "x"]),
    ],
)
def test_pre_tokenizers_cut_other_scripts_and_capitals_as_their_models_do(pre, expected):
    assert words(pre, "camelCaseHTTPServer's Été'東京 ///\nx") == expected


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["hey"]), ("gpt-2", ["he", "y"])])
def test_llama_3_takes_words_that_no_merge_reaches(pre, expected):
    tokenizer = tokenizer_from_gguf(byte_level(pre), "file")
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hey", False)] == expected


def test_merges_are_applied():
    tokenizer = tokenizer_from_gguf(byte_level(), "file")
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hello w")] == ["hello", "Ġw"]


@pytest.mark.parametrize(
    ("pre", "stated", "starts_with_bos"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_beginning_of_text_token(pre, stated, starts_with_bos):
    tokenizer = tokenizer_from_gguf(byte_level(pre, ggml__add_bos_token=stated), "file")
    assert (tokenizer.encode("hello")[0] == 1) == starts_with_bos
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1


def test_end_tokens_and_special_tokens():
    tokenizer = tokenizer_from_gguf(byte_level(ggml__eot_token_id=3), "file")
    assert tokenizer.eos_token_ids == (2, 3)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert chat == "<s>user: hello</s><s>assistant: "


def test_templates_that_a_file_names():
    values = byte_level(chat_templates=["tool_use"], chat_template__tool_use="{{ tools }}")
    tokenizer = tokenizer_from_gguf(values, "file")
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, arguments={"tools": ["sum"]}) == "['sum']"
    assert "hello" in tokenizer.apply_chat_template(chat)


@pytest.mark.parametrize(
    "token",
    [
        *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|call|>"),
    ],
)
def test_a_token_that_ends_a_turn_or_a_text_ends_an_answer(token):
    """Models' `generation_config.json` names several, a GGUF often only one."""
    values = byte_level()
    values["tokenizer.ggml.tokens"][0] = token
    assert tokenizer_from_gguf(values, "file").eos_token_ids == (2, 0)
    named = {**values, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 1}
    assert tokenizer_from_gguf(named, "file").eos_token_ids == (2, 3, 1, 0)
    types = [1, *values["tokenizer.ggml.token_type"][1:]]
    text = {**values, "tokenizer.ggml.token_type": types}
    assert tokenizer_from_gguf(text, "file").eos_token_ids == (2,)


def test_a_files_end_tokens_may_be_of_another_type_or_of_none():
    values = byte_level()
    values["tokenizer.ggml.tokens"][3] = "<end_of_turn>"  # user-defined, as in early files of Gemma
    assert tokenizer_from_gguf(values, "file").eos_token_ids == (2, 3)
    assert tokenizer_from_gguf(values, "file").decode([3]) == ""
    del values["tokenizer.ggml.token_type"]
    assert tokenizer_from_gguf(values, "file").eos_token_ids == (2, 3)


@pytest.mark.parametrize(("others", "ends"), [((), (2, 0)), (("<|return|>", "<|call|>"), (2, 1, 3))])
def test_a_token_inside_the_answers_of_gpt_oss_ends_those_of_others(others, ends):
    values = byte_level()
    values["tokenizer.ggml.tokens"][0] = "<|end|>"
    for place, token in zip((1, 3), others, strict=False):
        values["tokenizer.ggml.tokens"][place] = token
    assert tokenizer_from_gguf(values, "file").eos_token_ids == ends


BAD_IDS = [None, -1, 2**32 - 1, 999]


@pytest.mark.parametrize("bad", BAD_IDS)
def test_bad_ids_of_a_sentencepiece_model_are_llama_cpps(bad):
    values = sentence_piece()
    for field in ("bos", "eos", "unknown", "padding", "eot"):
        values[f"tokenizer.ggml.{field}_token_id"] = bad
    tokenizer = tokenizer_from_gguf({key: v for key, v in values.items() if v is not None}, "file")
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("hi")[0] == 1


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize(("kind", "ends"), [(1, ()), (3, (11,))])
def test_bad_ids_of_a_byte_level_model_are_llama_cpps_but_never_a_word(bad, kind, ends):
    values = byte_level("llama-bpe")
    values["tokenizer.ggml.tokens"][:3] = ["<0>", "<1>", "<2>"]
    values["tokenizer.ggml.token_type"][11] = kind
    for field in ("bos", "eos", "unknown"):
        values[f"tokenizer.ggml.{field}_token_id"] = bad
    tokenizer = tokenizer_from_gguf({key: v for key, v in values.items() if v is not None}, "file")
    assert tokenizer.eos_token_ids == ends
    assert (tokenizer.encode("hello")[0] == 11) == bool(ends)


def test_glm_ends_an_answer_where_a_tools_would_begin():
    values = byte_level("glm4", ggml__eot_token_id=1)
    values["tokenizer.ggml.tokens"][0] = "<|observation|>"
    assert tokenizer_from_gguf(values, "file").eos_token_ids == (2, 1, 0)
    del values["tokenizer.ggml.eot_token_id"]
    assert tokenizer_from_gguf(values, "file").eos_token_ids == (2, 0)


GLM_TEMPLATE = """[gMASK]<sop>{%- if tools -%}<|system|>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}{% endfor %}{%- endif -%}
{%- for message in messages -%}<|{{ message.role }}|>
{{ message.content }}{%- endfor -%}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_tokens_with_the_same_text_are_named():
    values = byte_level()
    values["tokenizer.ggml.tokens"][-1] = "hello"
    with pytest.raises(CheckpointError, match=r"token 266 has the text of token 263, 'hello'"):
        tokenizer_from_gguf(values, "file")


def test_tokens_without_a_text_are_told_apart():
    values = byte_level()
    values["tokenizer.ggml.tokens"] += ["", ""]
    tokenizer = tokenizer_from_gguf(values, "file")
    assert [tokenizer.vocabulary[f"[EMPTY_{i}]"] for i in (267, 268)] == [267, 268]
    assert tokenizer.encode("hello") == tokenizer_from_gguf(byte_level(), "file").encode("hello")


def test_what_a_template_writes_in_front_becomes_ids_once():
    """GLM's begins with "[gMASK]<sop>", and its files name "[gMASK]" as the token that texts begin with."""
    values = byte_level("glm4", chat_template=GLM_TEMPLATE)
    tokens = values["tokenizer.ggml.tokens"]
    tokens[:3] = ["<|user|>", "[gMASK]", "<|assistant|>"]
    tokens[3], values["tokenizer.ggml.token_type"][3] = "<sop>", 3
    tokenizer = tokenizer_from_gguf(values, "file")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert chat == "[gMASK]<sop><|user|>\nhello<|assistant|>"
    ids = tokenizer.encode(chat)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == [
        *("[gMASK]", "<sop>", "<|user|>", "Ċ", "hello", "<|assistant|>")
    ]


def test_sentence_piece_merges_by_score():
    tokenizer = tokenizer_from_gguf(sentence_piece(), "file")
    tokens = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hit hi é")]
    # "it" has a higher score than "hi", so "hit" is h + it; é is in no word and becomes bytes.
    assert tokens == ["<s>", "▁h", "it", "▁hi", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hit hi é")) == "hit hi é"


def test_gemma_4_merges_in_the_order_of_its_file_and_always_begins_with_bos():
    """Over whole texts, so a token may hold spaces and line ends."""
    merges = ["h i", "i t", "▁ hi", "\n \n", "▁ ▁"]
    words = ["h", "i", "t", "▁", "\n", *(merge.replace(" ", "") for merge in merges)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = tokenizer_from_gguf(values, "file")
    ids = tokenizer.encode("hit  hi\n\n é")
    found = [tokenizer.backend.id_to_token(i) for i in ids]
    assert found == ["<bos>", "hi", "t", "▁", "▁hi", "\n\n", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hit  hi\n\n é"
    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (byte_level("bert-bge"), "pre-tokenizer 'bert-bge' is not supported; supported: default"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokens is missing"),
        (byte_level(ggml__merges=["q zz"]), "merges"),
        ({**sentence_piece(), "tokenizer.ggml.scores": [0.0]}, "scores does not fit"),
    ],
)
def test_what_is_not_known_is_named(values, message):
    with pytest.raises(CheckpointError, match=rf"^file: .*{message}"):
        tokenizer_from_gguf(values, "file")


def test_no_tokenizer():
    assert tokenizer_from_gguf({}, "file") is None
