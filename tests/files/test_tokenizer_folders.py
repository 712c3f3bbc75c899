"""Tokenizers of folders equal those that transformers makes of the same files (tests/goldens/tokenizers)."""

import json

import golden_files
import pytest
from tiny_folder import write_json, write_tokenizer

from jaxspec.files import CheckpointError, Tokenizer

FOLDER = golden_files.FOLDER / "tokenizers"
CASES = sorted(path.name for path in FOLDER.iterdir())
# transformers also lists special tokens of kinds that a model alone knows.
OF_ONE_MODEL = {"image_token", "boi_token"}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case):
    folder = FOLDER / case
    expected = json.loads((folder / "expected.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_folder(folder)
    # `encode` writes one BOS where a text brings one; transformers writes two.
    assert [tokenizer.backend.encode(text).ids for text in expected["texts"]] == expected["ids"]
    assert [tokenizer.decode(ids) for ids in expected["ids"]] == expected["decoded"]
    whole = [tokenizer.decode(ids, skip_special_tokens=False) for ids in expected["ids"]]
    assert whole == expected["decoded_whole"]
    special = expected["special_tokens"]
    assert tokenizer.special_tokens == {key: special[key] for key in special if key not in OF_ONE_MODEL}


@pytest.mark.parametrize("case", CASES)
def test_saved_it_is_the_same(tmp_path, case):
    original = Tokenizer.from_folder(FOLDER / case)
    original.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    texts = json.loads((FOLDER / case / "expected.json").read_text("utf-8"))["texts"]
    assert again.encode_all(texts) == original.encode_all(texts)
    assert again.vocabulary == original.vocabulary
    assert again.special_tokens == original.special_tokens


def test_a_token_that_cannot_have_its_id_is_named(tmp_path):
    write_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"300": {"content": "<new>"}}})
    with pytest.raises(CheckpointError, match="added token '<new>' is 300, but the tokenizer makes it 267"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "added_tokens_decoder must be an object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"a": {}}}}, "'a' is no token id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"1": "a"}}}, "objects with a content, got 'a'"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"1": {"content": "a", "lstrip": 2}}}},
            "'a' has a flag that is neither true nor false",
        ),
        ({"added_tokens.json": {"a": -1}}, "added_tokens.json: -1 is no token id"),
        ({"chat_template.json": {"chat_template": 3}}, "chat_template must be a string, got 3"),
    ],
)
def test_bad_values_are_named(tmp_path, files, message):
    write_tokenizer(tmp_path)
    for name, content in files.items():
        write_json(tmp_path / name, content)
    (tmp_path / "tokenizer_config.json").touch()
    if "tokenizer_config.json" not in files:
        write_json(tmp_path / "tokenizer_config.json", {})
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no tokens"),
        (b"IQ== 0\n", "has no token for 255 bytes, 0 among them"),  # a file of tiktoken
        (b"IQ== 0\nIQ 1\n", "not a file of tiktoken"),
        (b"IQ== 0\nIQ==\n", "not a file of tiktoken"),
        (b"\x0a\x03\x0a\x01a\x12\x02\x18\x03", "of words or characters"),
        (b"\x0a\x03\x0a\x01a\x0a\x03\x0a\x01a", "two of its tokens have the same text"),
        (b"\x0a\x09\x0a\x01a", "it is cut short"),
    ],
)
def test_a_model_that_is_none_is_named(tmp_path, content, message):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "model_type", "message"),
    [
        (
            ["vocab.txt"],
            "llama",
            r"its tokenizer is only in vocab\.txt, which is not read; write a tokenizer\.json",
        ),
        (
            ["vocab.json", "merges.txt"],
            "qwen3_5",
            r"only in merges\.txt, vocab\.json, which is not read; write",
        ),
        (["qwen.tiktoken"], "qwen", r"only in qwen\.tiktoken, which is not read"),
        (["spiece.model"], "t5", r"only in spiece\.model, which is not read"),
    ],
)
def test_a_form_that_is_not_read_is_one_line(tmp_path, files, model_type, message):
    write_json(tmp_path / "config.json", {"model_type": model_type})
    for name in files:
        (tmp_path / name).write_text('{"a": 0}')
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_a_class_that_reads_no_vocabulary_is_named(tmp_path):
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizerFast"})
    (tmp_path / "vocab.txt").write_text("a\n")
    with pytest.raises(
        CheckpointError, match=r"only in vocab\.txt, which is not read for a BertTokenizer; write"
    ):
        Tokenizer.from_folder(tmp_path)


def test_tekken_alone_begins_texts_as_mistral_does(tmp_path):
    content = json.loads((FOLDER / "tekken" / "tekken.json").read_text("utf-8"))
    write_json(tmp_path / "tekken.json", content)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode(tokenizer.encode("Hello"), skip_special_tokens=False) == "<s>Hello"
    write_json(tmp_path / "tekken.json", {key: content[key] for key in ("config", "vocab")})
    with pytest.raises(CheckpointError, match=r"tekken\.json: lists no special_tokens"):
        Tokenizer.from_folder(tmp_path)
    content["config"]["default_num_special_tokens"] = 2**40
    write_json(tmp_path / "tekken.json", content)
    with pytest.raises(CheckpointError, match=r"has 1099511627776 tokens, and at most 1048576 are read"):
        Tokenizer.from_folder(tmp_path)


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>"})
    return tmp_path


CHAT = [{"role": "user", "content": "hello"}]


def test_a_template_in_a_file_of_a_processor(folder):
    write_json(folder / "chat_template.json", {"chat_template": "file"})
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "file"
    write_json(folder / "tokenizer_config.json", {"chat_template": "config"})
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "config"


def test_the_only_template_of_a_list_is_used(folder):
    write_json(folder / "tokenizer_config.json", {"chat_template": [{"name": "chat", "template": "a"}]})
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "a"


def test_several_templates_without_a_default_format_nothing_in_silence(folder, tmp_path_factory):
    entries = [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": entries})
    saved = tmp_path_factory.mktemp("saved")
    Tokenizer.from_folder(folder).save(saved)
    for tokenizer in (Tokenizer.from_folder(folder), Tokenizer.from_folder(saved)):
        assert tokenizer.has_chat_template
        with pytest.raises(CheckpointError, match="several chat templates and no default: 'rag', 'tool_use'"):
            tokenizer.apply_chat_template(CHAT)


def test_templates_in_files_of_their_own(folder):
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT) == "tools"
    (folder / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_templates == {"default": "file", "tool_use": "tools"}
    assert tokenizer.apply_chat_template(CHAT) == "file"
    (more / "tool_use.jinja").write_text("{{ tools }}")
    assert Tokenizer.from_folder(folder).apply_chat_template(CHAT, arguments={"tools": [1]}) == "[1]"
