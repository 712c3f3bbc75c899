"""Train an EAGLE-3 head: prompts, responses, draft vocabulary, training, evaluation, export.

    python scripts/train_eagle3.py CONFIG --output DIR [--data DIR] [--stage STAGE ...]

CONFIG is a TOML file (see configs/training/). Every stage continues where it was interrupted; a finished
one is not run again.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxspec import CheckpointError, ConfigError
from jaxspec.training.config import load_training_run
from jaxspec.training.pipeline import Pipeline
from jaxspec.training.stage_folder import STAGES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a training TOML")
    parser.add_argument("--output", type=Path, required=True, help="a folder that is new or this run's own")
    parser.add_argument("--data", type=Path, help="where the prompt files are; default: beside CONFIG")
    parser.add_argument("--stage", action="append", choices=STAGES, help="run this one only; may be repeated")
    args = parser.parse_args(arguments)
    try:
        run = load_training_run(args.config)
        pipeline = Pipeline(run, args.output, data=args.data or args.config.parent)
        for stage in STAGES:
            if not args.stage or stage in args.stage:
                print(f"{stage}: {json.dumps(pipeline.run_stage(stage))}", flush=True)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
