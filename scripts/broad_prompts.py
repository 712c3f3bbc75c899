"""Write a broad set of prompts for training a draft head, and held-out prompts by task.

    python scripts/broad_prompts.py SOURCES OUTPUT [--target TARGET] [--apart FILE.jsonl ...] [--seed 0]

SOURCES is a folder of unpacked packages and repositories; `scripts/data/prompt_sources.toml` says which ones,
where they come from, their licences, and how many rows of which task each one gives. OUTPUT gets
`train.jsonl`, `heldout/TASK.jsonl` and `sources.md`, the table of sources. The same folder and seed give the
same rows. `scripts/data/prompt_templates.toml` has the wordings; held-out prompts have their own.

A row that shares 13 words in a row with a file after --apart is left out, and a training row that shares them
with a held-out prompt.
"""

import argparse
import json
import random
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prompt_readers import READERS, Asked, Code, Dialogue, Document, Exchange, Item, Text, words

from jaxspec.commands.command_line import Parser
from jaxspec.config import resolve_config
from jaxspec.files import open_checkpoint
from jaxspec.lab.training.held_out import HeldOut, normalise
from jaxspec.lab.training.prompt_files import read_texts
from jaxspec.lab.training.prompts import check_tokenizer

DATA = Path(__file__).parent / "data"
LIMIT = 2048  # tokens of a prompt with the chat template
OWN = "written for this script"
ROUNDS = 3  # how often a source may be gone through for one task, each time with other draws
LANGUAGES = {
    "de": "German", "en": "English", "es": "Spanish", "fr": "French", "it": "Italian",
    "ja": "Japanese", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ru": "Russian", "zh": "Chinese",
}  # fmt: skip
Message = dict[str, str]
Templates = dict[str, Any]
Draws = random.Random
Maker = Callable[[Draws, Item, list[Item], Templates], str | list[Message] | None]


def fill(draws: Draws, templates: Templates, text: str, ask: str, kind: str = "text") -> str:
    """An instruction and a text in one of the layouts, with or without a label such as "Article:"."""
    layout = draws.choice(templates["layouts"])
    return layout.format(ask=ask, text=text, label=draws.choice(templates["labels"][kind]))


def transcript(draws: Draws, dialogue: Dialogue, longest: int) -> str:
    """Some consecutive turns of a dialogue, one a line, of about as many words."""
    turns = dialogue.turns
    start = draws.choice((0, draws.randrange(max(1, len(turns) - 8))))
    lines: list[str] = []
    for speaker, text in turns[start:]:
        lines.append(f"{speaker}: {text}")
        if sum(map(words, lines)) > longest:
            break
    return "\n".join(lines)


def summary(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    if isinstance(item, Dialogue):
        text = transcript(draws, item, draws.randint(100, 650))
        return fill(draws, templates, text, draws.choice(templates["summaries"]["dialogue"]), "dialogue")
    if isinstance(item, Document):
        asks = templates["summaries"]["text"]
        return fill(draws, templates, item.text, draws.choice(asks), "text")
    return None


def question_about(draws: Draws, item: Item, templates: Templates) -> str | None:
    """The item's own question, or one of a few general ones about a name in its text."""
    if isinstance(item, Asked):
        return draws.choice(item.exchanges)[0]
    assert isinstance(item, Document)
    if item.names and draws.random() < 0.8:
        return draws.choice(templates["passages"]["about"]).format(name=draws.choice(item.names))
    return draws.choice(templates["passages"]["general"])


def passages(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    if not isinstance(item, Document | Asked):
        return None
    question = question_about(draws, item, templates)
    count = draws.choice((1, 1, 1, 2, 3, 3, 4, 5))
    texts = [item.text]
    for other in draws.sample(others, min(2 * count, len(others))):
        if len(texts) < count and isinstance(other, Document | Asked) and other.text not in texts:
            texts.append(other.text)
    draws.shuffle(texts)
    label = draws.choice(templates["passages"]["numbers"])
    context = texts[0] if len(texts) == 1 else "\n\n".join(
        label.format(number=number, text=text) for number, text in enumerate(texts, 1)
    )  # fmt: skip
    wordings = templates["passages"]["one" if len(texts) == 1 else "several"]
    return draws.choice(wordings).format(context=context, question=question)


def translation(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    if not isinstance(item, Text | Document):
        return None
    source = item.language
    wanted = draws.choices(
        ("de", "fr", "es", "it", "ru", "zh", "pt", "nl", "pl", "ja"), (8, 6, 6, 4, 3, 3, 1, 1, 1, 1)
    )
    target = wanted[0] if source == "en" else "en"
    ask = draws.choice(templates["translation"]["asks"])
    return ask.format(source=LANGUAGES[source], target=LANGUAGES[target], text=item.text)


def rewriting(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    if not isinstance(item, Text | Document | Asked):
        return None
    return fill(draws, templates, item.text, draws.choice(templates["rewriting"]["asks"]), "text")


def extraction(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    asks = templates["extraction"]
    if isinstance(item, Dialogue):
        text = transcript(draws, item, draws.randint(60, 250))
        return fill(draws, templates, text, draws.choice(asks["dialogue"]), "dialogue")
    if isinstance(item, Text) and item.label:
        known = sorted({other.label for other in others if isinstance(other, Text)} - {item.label})
        labels = [item.label, *draws.sample(known, min(draws.randint(2, 6), len(known)))]
        draws.shuffle(labels)
        ask = draws.choice(asks["classify"]).format(labels=", ".join(labels).replace("_", " "))
        return fill(draws, templates, item.text, ask, "message")
    if isinstance(item, Text | Document | Asked):
        return fill(draws, templates, item.text, draws.choice(asks["text"]), "text")
    return None


def code(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    if isinstance(item, Text):
        return draws.choice(templates["code"]["tasks"]).format(task=item.text)
    if isinstance(item, Exchange):
        return item.request
    if isinstance(item, Code):
        ask = draws.choice(templates["code"]["asks"]).format(language=item.language)
        fence = f"```{item.language.lower()}\n{item.text}\n```" if draws.random() < 0.8 else item.text
        return f"{ask}\n\n{fence}" if draws.random() < 0.7 else f"{fence}\n\n{ask}"
    return None


def turns(draws: Draws, item: Item, others: list[Item], templates: Templates) -> list[Message] | None:
    """A conversation that ends with a user's turn."""
    follow = templates["turns"]
    if isinstance(item, Dialogue):
        texts = [text for _, text in item.turns]
        texts = texts[item.first_user :][: 2 * draws.randint(1, 5) + 1]
        texts = texts[: len(texts) - 1 + len(texts) % 2]
    elif isinstance(item, Exchange):
        texts = [item.request, item.answer, draws.choice(follow["code" if item.code else "general"])]
    elif isinstance(item, Asked):
        first = draws.choice(follow["passage"]).format(text=item.text, question=item.exchanges[0][0])
        chosen = item.exchanges[: draws.randint(2, 5)]
        texts = [
            first,
            *(text for at, (question, _) in enumerate(chosen[1:]) for text in (chosen[at][1], question)),
        ]
    elif isinstance(item, Document):
        lead = " ".join(item.sentences[:2])
        texts = [fill(draws, templates, item.text, draws.choice(templates["summaries"]["text"])), lead]
        texts.append(draws.choice(follow["general"]))
    else:
        return None
    if len(texts) < 3:
        return None
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def request(draws: Draws, item: Item, others: list[Item], templates: Templates) -> str | None:
    """A short question or everyday request, as it is."""
    if isinstance(item, Exchange):
        return item.request
    return item.text if isinstance(item, Text) else None


MAKERS: dict[str, Maker] = {
    "summaries": summary,
    "passages": passages,
    "translation": translation,
    "rewriting": rewriting,
    "extraction": extraction,
    "code": code,
    "turns": turns,
    "questions": request,
    "chat": request,
}
# Shortest and longest passage cut from a document, in words.
CUTS = {
    "summaries": (120, 900), "passages": (50, 260), "translation": (8, 90), "rewriting": (12, 130),
    "extraction": (30, 300), "turns": (80, 400),
}  # fmt: skip


def compositions(draws: Draws, templates: Templates, kind: str) -> Iterator[Item]:
    """Requests or questions made of a wording and a topic, written for this purpose."""
    part = templates[kind]
    for _ in range(100_000):
        wording = draws.choice(part["asks"])
        slots = {
            name: draws.choice(values) for name, values in part["slots"].items() if f"{{{name}}}" in wording
        }
        yield Text(wording.format(**slots), "en")


def items_of(
    source: dict[str, Any], folder: Path, task: str, draws: Draws, templates: Templates
) -> Iterator[Item]:
    """The items of a source for one task, in a drawn order; documents are cut into passages."""
    if source["reader"] == "own":
        yield from compositions(draws, templates, task)
    read = READERS[source["reader"]]
    paths = sorted(path for pattern in source["files"] for path in folder.glob(pattern) if path.is_file())
    items = list(read(paths, **source.get("options", {})))
    for _ in range(ROUNDS):
        cut: list[Item] = []
        for item in items:
            if isinstance(item, Document) and task in CUTS:
                cut += item.passages(draws, *CUTS[task])
            elif isinstance(item, Asked) and task == "passages":
                cut += [Asked(item.text, (exchange,)) for exchange in item.exchanges]
            else:
                cut.append(item)
        draws.shuffle(cut)
        yield from cut


class Rows:
    """Collects distinct rows that are short enough and repeat none of the named texts to keep apart."""

    def __init__(self, tokens: Callable[[list[Message]], int], apart: dict[str, HeldOut]):
        self.rows: list[dict[str, Any]] = []
        self.removed: Counter[str] = Counter()
        self._seen: set[tuple[str, ...]] = set()
        self._tokens = tokens
        self._apart = apart

    def add(self, source: str, task: str, made: str | list[Message]) -> bool:
        messages = [{"role": "user", "content": made}] if isinstance(made, str) else made
        said = normalise("\n".join(message["content"] for message in messages))
        if not said or said in self._seen:
            self.removed["repeated"] += 1
            return False
        self._seen.add(said)
        for name, texts in self._apart.items():
            if any(message["content"] in texts for message in messages):
                self.removed[f"13 words in a row with {name}"] += 1
                return False
        if self._tokens(messages) > LIMIT:
            self.removed[f"more than {LIMIT} tokens"] += 1
            return False
        body = {"prompt": made} if isinstance(made, str) else {"messages": made}
        self.rows.append({"source": source, "task": task, **body})
        return True


def make_rows(
    sources: dict[str, Any], folder: Path, templates: Templates, seed: int, rows: Rows
) -> Counter[tuple[str, str]]:
    """Adds every source's rows; returns how many by source and task."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, source in sources.items():
        for task, wanted in source["rows"].items():
            draws = random.Random(f"{seed}/{name}/{task}")
            pool: list[Item] = []
            for item in items_of(source, folder, task, draws, templates):
                if counts[name, task] == wanted:
                    break
                made = MAKERS[task](draws, item, pool, templates)
                pool = [*pool[-199:], item]  # what came just before serves as further passages and labels
                if made and rows.add(name, task, made):
                    counts[name, task] += 1
    return counts


def build(
    sources: dict[str, Any],
    folder: Path,
    templates: Templates,
    output: Path,
    *,
    apart: list[str],
    tokens: Callable[[list[Message]], int],
    seed: int,
) -> str:
    """Writes the training and the held-out rows; returns what was written and removed, in words."""
    parts = {
        held: {n: s for n, s in sources.items() if s.get("held_out", False) == held} for held in (True, False)
    }
    shared = {s["origin"] for s in parts[True].values()} & {s["origin"] for s in parts[False].values()} - {
        OWN
    }
    if shared:
        raise ValueError(f"both trained on and held out: {', '.join(sorted(shared))}")
    files = HeldOut(apart)
    held_out = Rows(tokens, {"a file apart": files})
    counts = make_rows(parts[True], folder, templates["held_out"], seed, held_out)
    for task in MAKERS:
        rows = [row for row in held_out.rows if row["task"] == task]
        if rows:
            numbered = [{"id": f"{task}-{number}", **row} for number, row in enumerate(rows)]
            write(output / "heldout" / f"{task}.jsonl", numbered)
    kept_apart = [text for row in held_out.rows for text in texts_of(row)]
    trained = Rows(tokens, {"a file apart": files, "a held-out prompt": HeldOut(kept_apart)})
    counts += make_rows(parts[False], folder, templates["train"], seed, trained)
    random.Random(seed).shuffle(trained.rows)
    write(output / "train.jsonl", trained.rows)
    (output / "sources.md").write_text(table(sources, counts), "utf-8")
    tasks = Counter(row["task"] for row in trained.rows)
    return (
        f"{len(trained.rows)} rows to train on: {dict(tasks)}\nremoved: {dict(trained.removed)}\n"
        f"{len(held_out.rows)} rows held out; removed: {dict(held_out.removed)}"
    )


def texts_of(row: dict[str, Any]) -> list[str]:
    """All that was said in a row."""
    return [row["prompt"]] if "prompt" in row else [message["content"] for message in row["messages"]]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def table(sources: dict[str, Any], counts: Counter[tuple[str, str]]) -> str:
    """The sources with licences and rows, in Markdown."""
    lines = ["| source | from | licence | held out | rows |", "|---|---|---|---|---|"]
    for name, source in sources.items():
        rows = ", ".join(f"{task} {counts[name, task]}" for task in source["rows"])
        held_out = "yes" if source.get("held_out") else ""
        lines.append(f"| {name} | {source['origin']} | {source['licence']} | {held_out} | {rows} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="the folder of unpacked sources")
    parser.add_argument("output", type=Path)
    parser.add_argument("--target", default="smollm2-135m", help="whose tokens are counted")
    parser.add_argument("--apart", type=Path, nargs="*", default=[], help="prompts to keep out of all rows")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    sources = tomllib.loads((DATA / "prompt_sources.toml").read_text("utf-8"))
    templates = tomllib.loads((DATA / "prompt_templates.toml").read_text("utf-8"))
    target = resolve_config(args.target).target
    checkpoint = open_checkpoint(target.source, file=target.file, sha256=target.sha256)
    tokenizer = check_tokenizer(checkpoint.tokenizer, args.target)
    report = build(
        sources,
        args.sources,
        templates,
        args.output,
        apart=[text for path in args.apart for text in read_texts(path)],
        tokens=lambda messages: len(
            tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        ),
        seed=args.seed,
    )
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
