"""Readers of the sources of `broad_prompts.py`: files of one form in, plain texts out."""

import ast
import csv
import gzip
import html
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.lab.training.held_out import UNSPACED

_END = re.compile(
    r"(?<=[.!?…])[\"'\u201d\u2019»)]*\s+(?=[\"'\u201c\u2018«(¿¡]?[A-ZÀ-Þ\u0410-\u042f0-9])"
    r"|(?<=[\u3002\uff01\uff1f])"
)
_ENDS_WELL = re.compile(r"[.!?…\u3002\uff01\uff1f][\"'\u201d\u2019»)]*$")
_NAME = re.compile(r"(?<=[a-z,] )[A-Z][a-z]{2,}(?: (?:of |the |de )?[A-Z][a-z]{2,}){0,3}")
_ABBREVIATED = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|St|Prof|vs|etc|e\.g|i\.e|viz|z\.B|d\.h|bzw|[A-Z]|\d{1,2})\.[\"'”]*$"
)


def sentences(text: str) -> list[str]:
    """A text's sentences; an abbreviation such as "Dr." ends none."""
    parts: list[str] = []
    at = 0
    for match in _END.finditer(text):
        if not _ABBREVIATED.search(text[at : match.start()]):
            parts.append(text[at : match.end()].strip())
            at = match.end()
    return [part for part in [*parts, text[at:].strip()] if part]


def words(text: str) -> int:
    """About how many words a text has; two letters of a script without spaces count as one."""
    return len(text.split()) + len(re.findall(f"[{UNSPACED}]", text)) // 2


@dataclass(frozen=True)
class Document:
    """Prose in paragraphs, each of which ends with a sentence."""

    paragraphs: tuple[str, ...]
    language: str = "en"

    @property
    def text(self) -> str:
        return "\n\n".join(self.paragraphs)

    @property
    def sentences(self) -> list[str]:
        return [sentence for paragraph in self.paragraphs for sentence in sentences(paragraph)]

    @property
    def names(self) -> list[str]:
        """Names in the text, in order, without repeats."""
        return list(dict.fromkeys(_NAME.findall(self.text)))

    def passages(self, draws: random.Random, shortest: int, longest: int) -> Iterator["Document"]:
        """Consecutive passages of drawn lengths in words, cut at the ends of sentences."""
        wanted, paragraphs, count = draws.randint(shortest, longest), [""], 0
        for paragraph in self.paragraphs:
            for sentence in sentences(paragraph):
                size = words(sentence)
                if count and count + size > wanted:
                    if count >= shortest:
                        yield Document(tuple(filter(None, paragraphs)), self.language)
                    wanted, paragraphs, count = draws.randint(shortest, longest), [""], 0
                if size <= longest:
                    paragraphs[-1] = f"{paragraphs[-1]} {sentence}".strip()
                    count += size
            paragraphs.append("")
        if count >= shortest:
            yield Document(tuple(filter(None, paragraphs)), self.language)


@dataclass(frozen=True)
class Asked:
    """A passage with pairs of a question and its answer."""

    text: str
    exchanges: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Dialogue:
    """Pairs of a speaker and what was said; `first_user` is the place of the user's first turn."""

    turns: tuple[tuple[str, str], ...]
    first_user: int = 0


@dataclass(frozen=True)
class Text:
    """A sentence, question, request or task, perhaps with the name of its class."""

    text: str
    language: str = "en"
    label: str = ""


@dataclass(frozen=True)
class Code:
    language: str
    text: str


@dataclass(frozen=True)
class Exchange:
    """A request and its answer."""

    request: str
    answer: str
    code: bool = False


Item = Document | Asked | Dialogue | Text | Code | Exchange


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return data.decode("latin-1").replace("\r\n", "\n")


def _prose(paragraphs: list[str], language: str = "en", shortest: int = 8) -> Document:
    """A document of the paragraphs that are whole sentences without debris of markup."""
    joined = (re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)
    kept = (
        text
        for text in joined
        if words(text) >= shortest
        and _ENDS_WELL.search(text)
        and not text[0].islower()
        and not re.search(r"[{}<>|\\]|https?:|&\w+;|__|\*\*|==|^\d+\.\s|\[\d|^[A-ZÀ-Þ]{4,}\s", text)
        and (language == "en") == _english(text)
    )
    return Document(tuple(kept), language)


def _english(text: str) -> bool:
    found = re.findall(r"[a-zà-ÿ]+", text.lower())
    return sum(word in _COMMON for word in found) >= 0.12 * max(len(found), 1) and bool(found)


_COMMON = {
    "the", "of", "and", "to", "is", "are", "was", "were", "that", "it", "with",
    "as", "for", "you", "your", "this", "be", "by", "his", "her", "he", "she",
    "they", "not",
}  # fmt: skip


def books(paths: list[Path], language: str = "en") -> Iterator[Item]:
    """Project Gutenberg's plain texts."""
    for path in paths:
        body = re.split(r"\*\*\* ?(?:START|END) OF[^\n]*\n", _read(path))
        text = max(body, key=len).replace("_", "").replace("--", " — ").replace("`", "'")
        yield _prose(text.split("\n\n")[30:], language, shortest=4)


def markdown(paths: list[Path]) -> Iterator[Item]:
    for path in paths:
        text = re.sub(r"\A---\n.*?\n---\n", "", _read(path), flags=re.S)
        text = re.sub(r"```.*?```|\{%.*?%\}|\{\{.*?\}\}|<!--.*?-->|<[^>]*>", "", text, flags=re.S)
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
        text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
        text = re.sub(r"\*\*|__|(?<!\w)[*_]|[*_](?!\w)|`", "", html.unescape(text))
        blocks = [
            block for block in text.split("\n\n") if not re.match(r"\s*([#>|+]|[-*] |\d+\. |    )", block)
        ]
        yield _prose(blocks)


def restructured(paths: list[Path]) -> Iterator[Item]:
    """reStructuredText; code, directives and lists are left out."""
    for path in paths:
        text = re.sub(r":pep:`(\d+)`", r"PEP \1", _read(path))
        text = re.sub(r":[\w:-]+:`([^`<]*?)(?: ?<[^>]*>)?`", r"\1", text)
        text = re.sub(r"`([^`<]*?) ?<[^>]*>`_+", r"\1", text).replace("``", "")
        text = re.sub(r"`([^`]*)`_*|\*\*?([^*\n]+)\*\*?", r"\1\2", text)
        text = re.sub(r"\s?\[[\w#-]+\]_|::(?=\n)", "", text)
        blocks = [
            block for block in text.split("\n\n") if not re.match(r"\s|\.\.|[-*+#|] |\d+\.|\w[\w-]*:", block)
        ]
        yield _prose([block for block in blocks if not re.search(r"\n[=~^'\"-]{4,}", block)])


def markup(paths: list[Path], language: str = "en", tag: str = "p", attributes: str = "") -> Iterator[Item]:
    """The paragraphs of HTML, Mallard or CNXML pages: elements with this tag and these first attributes."""
    for path in paths:
        text = re.sub(
            r"<(script|style|head|note|table|figure|equation|exercise)\b.*?</\1>",
            " ",
            _read(path),
            flags=re.S,
        )
        found = re.findall(rf"<{tag}\b\s*{attributes}[^>]*>(.*?)</{tag}>", text, flags=re.S)
        plain = [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in found]
        yield _prose([re.sub(r"\s+([.,)])", r"\1", each) for each in plain], language)


def factbook(paths: list[Path]) -> Iterator[Item]:
    """The CIA World Factbook as JSON: its longer texts, country by country."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for each in value.values():
                yield from texts(each)
        elif isinstance(value, str) and len(value) > 250:
            yield re.sub(r"<[^>]*>", " ", html.unescape(value))

    for path in paths:
        yield _prose(list(texts(json.loads(_read(path)))))


def _paragraphs(paths: list[Path]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in paths:
        for paragraph in (each for page in json.loads(_read(path))["data"] for each in page["paragraphs"]):
            yield paragraph["context"], paragraph["qas"]


def squad(paths: list[Path]) -> Iterator[Item]:
    """SQuAD's JSON; long contexts are cut to the sentences around the answer."""
    for context, pairs in _paragraphs(paths):
        if words(context) < 400:
            yield Asked(context, tuple((pair["question"], pair["answers"][0]["text"]) for pair in pairs))
            continue
        plain = re.sub(r"\s*\[[\d ,-]+\]|\s*\(https?:[^)]*\)", "", re.sub(r"\s+", " ", context))
        parts = sentences(re.sub(r"\s+(?=[.,;:)])", "", plain))
        for pair in pairs:
            answer = pair["answers"][0]["text"]
            at = next((i for i, part in enumerate(parts) if answer[:60] in part), None)
            if at is not None:
                yield Asked(" ".join(parts[max(0, at - 4) : at + 5]), ((pair["question"], answer),))


def contexts(paths: list[Path], language: str, whole: bool = False) -> Iterator[Item]:
    """The paragraphs of SQuAD's JSON, or their sentences."""
    for context, _ in _paragraphs(paths):
        for text in [context] if whole else sentences(context):
            if words(text) >= 6 and _ENDS_WELL.search(text):
                yield Text(text, language)


def treebank(paths: list[Path], language: str) -> Iterator[Item]:
    """The sentences of Universal Dependencies' CoNLL-U files."""
    for path in paths:
        for text in re.findall(r"^# text = (.*)$", _read(path), flags=re.M):
            if words(text) >= 5 and _ENDS_WELL.search(text):
                yield Text(text, language)


def fortunes(paths: list[Path], language: str) -> Iterator[Item]:
    for path in paths:
        for text in re.split(r"\n%\n", _read(path)):
            text = re.sub(r"\s+", " ", re.split(r"\n\s*-- ?", text)[0]).strip()
            if 6 <= words(text) <= 80 and _ENDS_WELL.search(text) and not re.search(r"[|\\/_=*<>]", text):
                yield Text(text, language)


def meetings(paths: list[Path]) -> Iterator[Item]:
    """QMSum: transcripts, and the parts that answer a question."""
    for path in paths:
        meeting = json.loads(_read(path))
        said = [(turn["speaker"], _spoken(turn["content"])) for turn in meeting["meeting_transcripts"]]
        for at in range(0, len(said), 25):
            yield Dialogue(tuple((who, text) for who, text in said[at : at + 25] if words(text) > 2))
        for pair in meeting["specific_query_list"]:
            spans = [range(int(a), int(b) + 1) for a, b in pair["relevant_text_span"]]
            lines = [
                ": ".join(said[i]) for span in spans for i in span if i < len(said) and words(said[i][1]) > 2
            ]
            if 60 < words("\n".join(lines)) < 900:
                yield Asked("\n".join(lines), ((pair["query"], pair["answer"]),))


def _spoken(text: str) -> str:
    text = re.sub(r"\{\w+\}", "", text)
    return re.sub(r"\s+([.,?!;:'])", r"\1", re.sub(r"\s+", " ", text)).replace(" n't", "n't").strip(" ,")


def dialogues(paths: list[Path], user: str, text: str, speaker: str, turns: str) -> Iterator[Item]:
    """Dialogues in JSON; the arguments name the fields, and the speaker who is the user."""
    for path in paths:
        whole = json.loads(_read(path))
        for each in whole.values() if isinstance(whole, dict) else whole:
            merged: list[tuple[str, str]] = []
            for turn in each[turns]:
                said = re.sub(r"\s+", " ", turn[text]).strip()
                if merged and merged[-1][0] == turn[speaker]:
                    merged[-1] = (merged[-1][0], f"{merged[-1][1]} {said}")
                elif said:
                    merged.append((turn[speaker], said))
            names = {user: "User"}
            merged = [(names.get(who, who.replace("_", " ").capitalize()), said) for who, said in merged]
            first = next((i for i, (who, _) in enumerate(merged) if who == "User"), 0)
            if len(merged) >= 3:
                yield Dialogue(tuple(merged), first)


def trees(paths: list[Path]) -> Iterator[Item]:
    """Open Assistant's message trees: the first path through each."""
    for path in paths:
        for line in _read(path).splitlines():
            node, said = json.loads(line)["prompt"], []
            while node:
                said.append((node["role"], node["text"].strip()))
                replies = node.get("replies") or [None]
                node = replies[0]
            if len(said) >= 3:
                yield Dialogue(tuple(said))


def questions(paths: list[Path], least: float = 0.0) -> Iterator[Item]:
    """Tab-separated questions, perhaps with a rating of which `least` is the lowest taken."""
    for path in paths:
        for line in _read(path).splitlines():
            question, _, rating = line.partition("\t")
            question = re.sub(r"\s+([?.,'])", r"\1", question).strip()
            if words(question) >= 4 and question.endswith("?") and (not rating or float(rating) >= least):
                yield Text(question[0].upper() + question[1:])


def trivia(paths: list[Path]) -> Iterator[Item]:
    """OpenTriviaQA: questions with the right answer."""
    for path in paths:
        for question, answer in re.findall(r"#Q (.*?)\n\^ (.*?)\n", _read(path), flags=re.S):
            question = re.sub(r"\s+", " ", question).strip()
            if (
                question.endswith("?")
                and "�" not in question
                and not re.search(r"(?i)these|following", question)
            ):
                yield Exchange(question, answer.strip())


def original_questions(paths: list[Path]) -> Iterator[Item]:
    """Disfl-QA: the fluent questions."""
    for path in paths:
        for pair in json.loads(_read(path)).values():
            yield Text(pair["original"])


def gap(paths: list[Path]) -> Iterator[Item]:
    """GAP: short passages about people."""
    for path in paths:
        for row in csv.DictReader(_read(path).splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE):
            text = row["Text"].strip()
            if _ENDS_WELL.search(text) and not re.search(r"[*`\\|]", text):
                yield Document((text,))


def split_sentences(paths: list[Path]) -> Iterator[Item]:
    """WikiSplit: the long sentences."""
    for path in paths:
        for line in _read(path).splitlines():
            text = line.split("\t")[0].replace(" ''", '"').replace("'' ", '"')
            text = re.sub(r"\s+([.,?!;:')])", r"\1", text).replace("( ", "(")
            if text[0].isupper() and '"' not in text:
                yield Text(text)


def intents(paths: list[Path]) -> Iterator[Item]:
    """Requests with the name of what is wanted: CLINC's JSON or Banking77's CSV."""
    for path in paths:
        if path.suffix == ".json":
            pairs = [pair for part in json.loads(_read(path)).values() for pair in part]
        else:
            pairs = list(csv.reader(_read(path).splitlines()))[1:]
        for text, label in pairs:
            if words(text) >= 4 and label != "oos":  # CLINC's label for requests out of scope
                yield Text(text, "en", label)


def exchanges(
    paths: list[Path], request: str, answer: str, extra: str = "", code: bool = False
) -> Iterator[Item]:
    """Requests with answers in JSON or JSONL; the arguments name the fields."""
    for path in paths:
        text = _read(path)
        rows = json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines())
        for row in rows:
            asked = row[request].strip()
            if extra and (more := str(row[extra]).strip()) and len(more) < 1500:
                asked = f"{asked}\n\n{more}"
            if asked and row[answer].strip():
                yield Exchange(asked, row[answer].replace("\r", "").strip(), code)


def descriptions(paths: list[Path]) -> Iterator[Item]:
    """Exercism's descriptions of programming tasks."""
    for path in paths:
        text = re.sub(r"\A#[^\n]*\n+", "", _read(path)).strip()
        if words(text) < 350 and not re.search(r"\]\(|\]\[|<", text):
            yield Text(text)


def functions(paths: list[Path]) -> Iterator[Item]:
    """Python functions of 5 to 60 lines."""
    for path in paths:
        text = _read(path)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and 5 <= (node.end_lineno or 0) - node.lineno <= 60:
                lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
                yield Code("Python", textwrap.dedent("\n".join(lines)))


def programs(paths: list[Path], language: str) -> Iterator[Item]:
    """Whole files of 10 to 110 lines, without the comment before the first line of code."""
    for path in paths:
        text = re.sub(r"\A(?:\s*/\*.*?\*/\s*|\s*//[^\n]*\n)+", "", _read(path), flags=re.S).strip()
        if 10 <= text.count("\n") <= 110:
            yield Code(language, text)


def commands(paths: list[Path]) -> Iterator[Item]:
    """tldr pages: the commands, with an example for every {{argument}}."""
    for path in paths:
        for command in re.findall(r"^`(.+)`$", _read(path), flags=re.M):
            command = re.sub(r"\{\{(?:\[[^|\]]*\|)?(.*?)\]?\}\}", r"\1", command)
            if words(command) >= 3:
                yield Code("Bash", command)


READERS: dict[str, Callable[..., Iterator[Item]]] = {
    reader.__name__: reader
    for reader in (
        books, markdown, restructured, markup, factbook, squad, contexts, treebank, fortunes, meetings,
        dialogues, trees, questions, trivia, original_questions, gap, split_sentences, intents, exchanges,
        descriptions, functions, programs, commands,
    )
}  # fmt: skip
