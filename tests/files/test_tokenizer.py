import pytest
import tokenizers
from tiny_folder import write_json, write_tokenizer
from tiny_gguf import TEMPLATE
from tiny_tokenizers import byte_level, sentence_piece

from jaxspec.files import CheckpointError, Tokenizer
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def test_reads_a_folder(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == 267
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.has_chat_template
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert chat == "<s>user: hello</s>"


def test_prompts_are_neither_cut_nor_padded(folder):
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("hello world and more")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>hello world and more"


@pytest.mark.parametrize("values", [byte_level("qwen2", ggml__add_bos_token=True), sentence_piece()])
def test_saved_tokenizer_is_the_same(tmp_path, values):
    original = tokenizer_from_gguf(values, "tiny")
    original.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    text = "<s>hello hi 2024 é</s>"
    assert again.encode(text) == original.encode(text)
    assert again.decode(again.encode(text), skip_special_tokens=False) == original.decode(
        original.encode(text), skip_special_tokens=False
    )
    assert again.special_tokens == original.special_tokens
    assert again.chat_template == original.chat_template


def test_template_file_wins_over_the_config(folder):
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_default_of_several_templates(folder):
    entries = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    write_json(folder / "tokenizer_config.json", {"chat_template": entries})
    assert Tokenizer.from_folder(folder).chat_template == TEMPLATE


def test_no_template(tmp_path):
    tokenizer = tokenizer_from_gguf(sentence_piece(), "tiny")
    assert not tokenizer.has_chat_template
    with pytest.raises(CheckpointError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


def test_no_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(folder)


def test_many_texts_are_encoded_like_one_by_one(folder):
    tokenizer = Tokenizer.from_folder(folder)
    texts = ["hello", "world and more", "<s>hello hi"]
    for special in (True, False):
        one_by_one = [tokenizer.encode(text, add_special_tokens=special) for text in texts]
        assert tokenizer.encode_all(texts, add_special_tokens=special) == one_by_one


def test_lone_surrogate_is_named(folder):
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(CheckpointError, match="lone surrogate at 3"):
        tokenizer.encode("abc\ud800")
    with pytest.raises(CheckpointError, match="lone surrogate at 1"):
        tokenizer.encode_all(["abc", "d\ud800"])


def test_a_tokenizer_that_fails_over_a_text_is_an_error():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(CheckpointError, match="the tokenizer failed: WordLevel error: Missing"):
        Tokenizer(backend).encode("b")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos_token": 3}, "bos_token must be a string, got 3"),
        ({"bos_token": {"lstrip": True}}, "bos_token must be a string, got {'lstrip': True}"),
        ({"eos_token": ["</s>"]}, "eos_token must be a string, got"),
        ({"chat_template": 3}, "chat_template must be a string, got 3"),
        ({"chat_template": [{"name": "default"}, 3]}, None),
        ({"chat_template": [{"name": "default", "template": 3}]}, "chat_template must be a string, got 3"),
    ],
)
def test_a_config_of_other_types_is_named(folder, changes, message):
    write_json(folder / "tokenizer_config.json", changes)
    if message is None:
        assert not Tokenizer.from_folder(folder).has_chat_template
        return
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(folder)


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not UTF-8"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("values", [byte_level(), sentence_piece()])
def test_the_bytes_of_tokens_are_those_of_the_text(values):
    """Also where a token is a part of a character. SentencePiece strips the text's first space."""
    tokenizer = tokenizer_from_gguf(values, "tiny")
    text = " hello hi it é\u20ac\u0000"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [tokenizer.token_bytes(token) for token in ids]
    assert b"".join(parts).decode("utf-8").strip(" ") == text.strip(" ")
    assert max(parts.count(bytes([byte])) for byte in "€".encode()) == 1
    assert tokenizer.token_bytes(tokenizer.eos_token_ids[0]) == b"</s>"
    assert tokenizer.token_bytes(10_000) == b""
