"""Draw an answer with every token on the colour of its source: the picture of the README.

    python scripts/plot_answer.py "Explain gravity to a child in three sentences." --output docs/answer.svg

The picture's format is that of the file's name: .svg, .png or .pdf.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, cast

from jaxspec.commands.answering import add_model_options, load_engine
from jaxspec.commands.command_line import (
    Parser,
    add_sampling_options,
    add_speculation_options,
    report,
    sampling_params,
)
from jaxspec.installation import optional
from jaxspec.lab import plots


def main(arguments: list[str] | None = None) -> int:
    """Draws; see the module docstring."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", help="the user's turn")
    parser.add_argument("--output", type=Path, default=Path("answer.svg"), help="default: %(default)s")
    parser.add_argument("--width", type=int, default=84, help="characters per line; default: %(default)s")
    add_model_options(parser)
    add_sampling_options(parser, without=("logprobs", "logprobs_mode"))
    add_speculation_options(parser)
    args = parser.parse_args(arguments)
    try:
        params = sampling_params(args, args.model)
        # The same answer gives the same file.
        optional("matplotlib", extra="plots").rcParams["svg.hashsalt"] = "jaxspec"
        with load_engine(args, params) as engine:
            answer = engine.generate(args.prompt, params, raw=args.raw)
        figure = cast(Any, plots.token_strip(answer, width=args.width).figure)
        metadata = {"Date": None} if args.output.suffix == ".svg" else None
        figure.savefig(args.output, dpi=150, bbox_inches="tight", facecolor="white", metadata=metadata)
    except (ValueError, OSError, ImportError) as error:
        return report(error)
    print(f"{args.output}: {len(answer.token_ids)} tokens in {answer.stats.steps} target passes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
