"""Write prompts about functions of Python's standard library, an example domain to adapt a head to.

    python scripts/code_prompts.py OUTPUT.jsonl [--limit 4000] [--seed 0]

Every row has a "prompt": an instruction and the source of one function. The sources are those of the running
Python (Python-2.0 licence); nothing is downloaded.
"""

import argparse
import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

INSTRUCTIONS = (
    "Explain what this Python function does.",
    "Write a docstring for this Python function.",
    "What are the arguments and the return value of this Python function?",
    "Rewrite this Python function with type annotations.",
    "Write a short example that calls this Python function.",
)
SHORTEST, LONGEST = 6, 60  # lines of a function
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def functions(folder: Path) -> Iterator[str]:
    """The distinct sources of all functions in a folder, in a fixed order."""
    seen = set()
    for path in sorted(folder.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(folder).parts):
            continue
        try:
            text = path.read_text("utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            source = ast.get_source_segment(text, node) or ""
            if SHORTEST <= source.count("\n") + 1 <= LONGEST and source not in seen:
                seen.add(source)
                yield source


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--limit", type=int, default=4000, help="the most rows; default: 4000")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the choice of functions and instructions"
    )
    args = parser.parse_args(arguments)
    draws = random.Random(args.seed)
    sources = list(functions(Path(sysconfig.get_path("stdlib"))))
    draws.shuffle(sources)
    rows = [f"{draws.choice(INSTRUCTIONS)}\n\n```python\n{source}\n```" for source in sources[: args.limit]]
    lines = "".join(json.dumps({"prompt": row}) + "\n" for row in rows)
    args.output.write_text(lines, "utf-8")
    print(f"{args.output}: {len(rows)} prompts of {len(sources)} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
