"""Tokenizers that somebody broke are read and used, or refused by our own exceptions in one line."""

import json
import shutil

import golden_files
import pytest
import tokenizers
from fuzzing import TEXTS, changed, damaged, refused_or
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import TEMPLATE
from tiny_tokenizers import byte_level, sentence_piece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxspec.files import TextStream, Tokenizer
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf
from jaxspec.files.text.chat_template import render_chat

TEXT = "hello, w0rld 2024 é 🎉 <s> ▁ ##s"
MESSAGES = [{"role": "user", "content": TEXT}]


def word_piece():
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "w", "##0", "##rld", ",", "2024"]
    backend = tokenizers.Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.BertNormalizer(), normalizers.NFKC()])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.enable_truncation(4, stride=2)
    backend.enable_padding(length=8, pad_id=1, pad_token="[CLS]")
    return backend


def unigram():
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("h", -3.0), ("ello", -3.5), ("▁hello", -1.0), ("0", -9.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    spaces = normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    backend.normalizer = normalizers.Sequence([spaces, normalizers.Strip()])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True)])
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.Strip(" ", 1, 0), decoders.CTC()])
    backend.add_tokens([AddedToken("w0rld", lstrip=True, rstrip=True, single_word=True)])
    return backend


def word_level():
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "w0rld": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(",", "merged_with_next", invert=True)
    backend.decoder = decoders.BPEDecoder("</w>")
    backend.post_processor = processors.RobertaProcessing(("<unk>", 0), ("hello", 1))
    backend.add_special_tokens(["<s>"])
    return backend


KINDS = {
    "byte-level": tokenizer_from_gguf(byte_level("llama-bpe"), "file").backend,
    "sentence-piece": tokenizer_from_gguf(sentence_piece(), "file").backend,
    "word-piece": word_piece(),
    "unigram": unigram(),
    "word-level": word_level(),
}
DOCUMENTS = {name: json.loads(backend.to_str()) for name, backend in KINDS.items()}
PARTS = [part for document in DOCUMENTS.values() for part in document.values() if isinstance(part, dict)]
KEYS = tuple(sorted(set().union(*PARTS)))


def use(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert all(isinstance(token, int) for token in ids)
    tokenizer.decode(ids)
    tokenizer.decode([0, 1, 2**31 - 1])
    stream = TextStream(tokenizer.backend)
    stream.feed([*ids, 0, 5, 2**31 - 1])
    stream.finish()
    tokenizer.check_length(TEXT * 100, 64)


def read_and_use(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    refused_or(lambda: use(Tokenizer.from_folder(folder)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_other_values(folder, kind, data):
    read_and_use(folder, json.dumps(data.draw(changed(DOCUMENTS[kind], KEYS))).encode())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_other_bytes(folder, kind, data):
    read_and_use(folder, data.draw(damaged(json.dumps(DOCUMENTS[kind]).encode())))


@pytest.mark.parametrize("case", ["llama", "gemma", "unigram", "model-with-places"])
@given(data=st.data())
def test_other_bytes_of_a_sentencepiece_model(tmp_path_factory, case, data):
    folder = golden_files.FOLDER / "tokenizers" / case
    copy = tmp_path_factory.mktemp("model", numbered=True)
    config = folder / "tokenizer_config.json"
    if config.exists():
        shutil.copy(config, copy)
    (copy / "tokenizer.model").write_bytes(data.draw(damaged((folder / "tokenizer.model").read_bytes())))
    refused_or(lambda: use(Tokenizer.from_folder(copy)))


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@given(data=st.data())
def test_other_metadata_of_a_gguf(make, data):
    values = data.draw(changed(make(), ("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")))
    tokenizer = refused_or(lambda: tokenizer_from_gguf(values, "file"))
    if tokenizer is not None:
        refused_or(lambda: use(tokenizer))


PIECES = (
    *(
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "#}",
        "for m in messages",
        "endfor",
        "if true",
        "else",
        "endif",
        "set x =",
    ),
    *(
        "x",
        "messages",
        "m",
        ".content",
        "['role']",
        "[",
        "]",
        "(",
        ")",
        "|",
        "~",
        "+",
        "*",
        "**",
        "-",
        ",",
        ":",
    ),
    *(
        "9",
        "10",
        "range",
        "namespace",
        "raise_exception",
        "strftime_now",
        "tojson",
        "join",
        "loop.index",
        "in",
    ),
    *("is defined", "not", "generation", "endgeneration", "macro f(a)", "endmacro", "break", "continue"),
    *("include", "extends", "'a'", "__class__"),
)
TEMPLATES = st.lists(st.sampled_from(PIECES + TEXTS) | st.text(max_size=4), max_size=20).map(" ".join)
DAMAGED = damaged(TEMPLATE.encode()).map(lambda content: content.decode("utf-8", "replace"))


@given(template=TEMPLATES | DAMAGED)
def test_chat_templates(template):
    special = {"bos_token": "<s>"}
    text = refused_or(lambda: render_chat(template, MESSAGES, special, add_generation_prompt=True))
    assert text is None or isinstance(text, str)


@pytest.mark.parametrize(
    ("case", "file"),
    [
        *(("tiktoken", "tokenizer.model"), ("tekken", "tekken.json")),
        *(("gpt2", "vocab.json"), ("gpt2", "merges.txt")),
    ],
)
@given(data=st.data())
def test_damaged_vocabularies_of_other_forms(tmp_path_factory, case, file, data):
    source = golden_files.FOLDER / "tokenizers" / case
    content = (source / file).read_bytes()
    folder = tmp_path_factory.mktemp("form")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if file == "tekken.json" and data.draw(st.booleans()):
        keys = ("config", "vocab", "special_tokens", "rank", "token_str", "token_bytes", "pattern")
        broken = json.dumps(data.draw(changed(json.loads(content), keys))).encode()
    else:
        broken = data.draw(damaged(content))
    (folder / file).write_bytes(broken)
    refused_or(lambda: use(Tokenizer.from_folder(folder)))
