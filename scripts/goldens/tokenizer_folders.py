"""Tokenizers of folders: what transformers makes of `tokenizer.model`, and of tokens that stand beside it."""

import base64
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEXTS = (
    *("Hello world", "  two  spaces", "a\tb\n\nc", "naïve 😀 \uff46ull", "<s>hi</s> x", "</s>", "", " "),
    *("12<ctl> <sep>b", "x<start_of_turn>y<five> <|new|> z<|old|>", "a<|tool|>b <pad>!"),
)
MORE_TEXTS = ("cafe\u0301 e\u0301", "Sentence there", "rest seats seen")
"""For byte-level tokenizers: marks that NFC joins, and words in which the order of merges matters."""
SENTENCES = (
    "The rest of these sentences are there so that there are merges that compete: streets, nests, stones, "
    "rents, hertz, enter, letters, less, sense, seen, tree, tense, resent, east, easter.\n"
)
CORPUS = "Hello world, hello words. Two naive spaces were found in 2024.\n"


os.environ["TIKTOKEN_CACHE_DIR"] = ""  # it would keep what a path held before


def _token(content: str, **flags: bool) -> dict[str, Any]:
    names = ("lstrip", "rstrip", "normalized", "single_word")
    return {"content": content, **dict.fromkeys(names, False), "special": True, **flags}


NEW, TOOL = _token("<|new|>"), _token("<|tool|>", special=False, normalized=True, lstrip=True)
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}

MODELS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "vocab_size": 300, "byte_fallback": True},
    "gemma": {
        "model_type": "bpe",
        "vocab_size": 300,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "bos_piece": "<bos>",
        "eos_piece": "<eos>",
        "user_defined_symbols": ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n\n"],
    },
    "unigram": {
        "model_type": "unigram",
        "vocab_size": 40,
        "control_symbols": ["<ctl>"],
        "user_defined_symbols": ["<sep>"],
    },
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("bpe", "llama", {"tokenizer_config.json": LLAMA}),
    "llama-legacy": (
        "bpe", "llama", {"tokenizer_config.json": {**LLAMA, "legacy": True, "add_eos_token": True}}),
    "llama-without-prefix": (
        "bpe", "llama",
        {
            "tokenizer_config.json": {
                "tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False}}),
    "llama-added": (
        "bpe", "llama",
        {
            "tokenizer_config.json": {
                **LLAMA, "added_tokens_decoder": {"300": NEW, "301": TOOL}, "pad_token": "<pad>"}}),
    "model-alone": ("bpe", "llama", {}),
    "model-with-places": (
        "bpe", "llama",
        {
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "added_tokens_decoder": {"5": _token("<five>"), "300": NEW}}}),
    "gemma-alone": ("gemma", "gemma3_text", {}),
    "gemma": (
        "gemma", "gemma3_text",
        {
            "tokenizer_config.json": {
                "tokenizer_class": "GemmaTokenizer", "add_bos_token": True,
                "added_tokens_decoder": {"5": _token("<start_of_turn>"), "6": _token("<end_of_turn>")}}}),
    "unigram": ("unigram", "llama", {}),
    "unigram-ends": (
        "unigram", "glm4",
        {
            "tokenizer_config.json": {
                "add_bos_token": True, "add_eos_token": True, "eos_token": "<sep>"}}),
    "added-in-config": (
        "words", "llama",
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {"4": NEW, "5": TOOL}, "bos_token": "<s>",
                "eos_token": "<|new|>"},
            "added_tokens.json": {"<|old|>": 6}}),
    "other-flags-in-config": (
        "words", "llama",
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {"1": _token("<s>", special=False, lstrip=True)}}}),
    "special-in-config": (
        "words", "llama",
        {
            "tokenizer_config.json": {
                "eos_token": "<|old|>", "additional_special_tokens": ["<|tool|>"]}}),
    "named-in-config": (
        "words", "llama",
        {
            "tokenizer_config.json": {
                "extra_special_tokens": {"image_token": "<|tool|>"}, "boi_token": "<|new|>"}}),
    "added-in-file": ("words", "llama", {"added_tokens.json": {"<|new|>": 4, "<|old|>": 5}}),
    "special-in-map": (
        "words", "llama",
        {
            "tokenizer_config.json": {"eos_token": "</s>"},
            "special_tokens_map.json": {"eos_token": "<|old|>", "additional_special_tokens": ["<|new|>"]}}),
    "map-and-file": (
        "words", "llama",
        {
            "tokenizer_config.json": {"eos_token": "</s>"},
            "special_tokens_map.json": {"eos_token": {**NEW, "rstrip": True}},
            "added_tokens.json": {"<|new|>": 4}}),
}  # fmt: skip

BYTE_LEVEL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiktoken": (
        "tokenizer.model", "llama",
        {
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "added_tokens_decoder": {"320": NEW, "322": TOOL}, "bos_token": "<|new|>",
                "add_bos_token": True}}),
    "tiktoken-alone": ("tiktoken.model", "smollm3", {}),
    "tekken": (
        "tekken.json", "mistral",
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}}),
    "qwen2": (
        "vocab.json", "qwen2",
        {
            "tokenizer_config.json": {
                "tokenizer_class": "Qwen2Tokenizer",
                "added_tokens_decoder": {"299": _token("<|endoftext|>"), "300": NEW, "301": TOOL},
                "bos_token": None, "eos_token": "<|new|>", "pad_token": "<|endoftext|>",
                "unk_token": None}}),
    "qwen3-alone": ("vocab.json", "qwen3", {}),
    "gpt2": (
        "vocab.json", "llama",
        {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}}),
}  # fmt: skip
"""Cases of byte-level tokenizers, by the file of the vocabulary."""


def write(root: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, settings in MODELS.items():
            _train(Path(scratch, name), settings)
        for case, (model, model_type, files) in CASES.items():
            folder = root / "tokenizers" / case
            folder.mkdir(parents=True)
            files = {"config.json": {"model_type": model_type}, **files}
            if model == "words":
                _words().save(str(folder / "tokenizer.json"))
                stated = files.get("tokenizer_config.json", {})
                files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", **stated}
            else:
                (folder / "tokenizer.model").write_bytes(Path(scratch, f"{model}.model").read_bytes())
            for name, content in files.items():
                (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
            (folder / "expected.json").write_text(_expected(folder), "utf-8")
    tokenizer = _bytes()
    for case, (model, model_type, files) in BYTE_LEVEL.items():
        folder = root / "tokenizers" / case
        folder.mkdir(parents=True)
        _write_bytes(tokenizer, folder / model)
        for name, content in {"config.json": {"model_type": model_type}, **files}.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", "utf-8")
        (folder / "expected.json").write_text(_expected(folder, (*TEXTS, *MORE_TEXTS)), "utf-8")


def _bytes() -> Tokenizer:
    """Byte-level BPE of 299 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=299, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator([CORPUS, SENTENCES], trainer)
    return tokenizer


def _write_bytes(tokenizer: Tokenizer, path: Path) -> None:
    """Writes the vocabulary in the form that the file's name stands for."""
    table = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    coded = [base64.b64encode(bytes(table[c] for c in text)).decode() for text, _ in vocabulary]
    if path.suffix == ".model":
        path.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(coded)), "utf-8")
    elif path.name == "tekken.json":
        special = ["<unk>", "<s>", "</s>", "[INST]"]
        content = {
            "config": {
                "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
                "default_vocab_size": 8 + 290,
                "default_num_special_tokens": 8,
                "version": "v3",
            },
            "vocab": [{"rank": i, "token_bytes": token, "token_str": None} for i, token in enumerate(coded)],
            "special_tokens": [
                {"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(special)
            ],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    else:
        tokenizer.model.save(str(path.parent))
        end = {"<|endoftext|>": len(vocabulary)} if path.parent.name == "gpt2" else {}
        path.write_text(json.dumps({**dict(vocabulary), **end}, ensure_ascii=False) + "\n", "utf-8")


def _train(prefix: Path, settings: dict[str, Any]) -> None:
    corpus, rules = prefix.with_suffix(".txt"), prefix.with_suffix(".tsv")
    corpus.write_text(CORPUS * 4, "utf-8")
    # Full-width f to f: a small table in place of the usual one of 240 KB.
    rules.write_text("FF46\t66\n", "utf-8")
    named = {"normalization_rule_name": "identity"}
    if settings["model_type"] == "unigram":
        named = {"normalization_rule_tsv": str(rules)}
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(prefix),
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **named,
        **settings,
    )
    path = prefix.with_suffix(".model")
    model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
    for name in ("input", "model_prefix"):  # paths of this run
        model.trainer_spec.ClearField(name)
    model.normalizer_spec.ClearField("normalization_rule_tsv")
    path.write_bytes(model.SerializeToString(deterministic=True))


def _words() -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", "hi"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:3])
    return tokenizer


def _expected(folder: Path, texts: Sequence[str] = TEXTS) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.encode(text) for text in texts]
    expected = {
        "special_tokens": tokenizer.special_tokens_map,
        "texts": texts,
        "ids": ids,
        "decoded": [tokenizer.decode(each, skip_special_tokens=True) for each in ids],
        "decoded_whole": [tokenizer.decode(each, skip_special_tokens=False) for each in ids],
    }
    return json.dumps(expected, ensure_ascii=False) + "\n"
