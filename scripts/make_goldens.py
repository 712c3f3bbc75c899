# /// script
# requires-python = "==3.11.*"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "safetensors==0.8.0",
#     "tokenizers==0.23.3", "gguf==0.19.0", "numpy==2.4.6", "jinja2", "pip",
#     "sentencepiece==0.2.3", "protobuf==7.36.2", "compressed-tensors==0.20.0",
#     "speculators==0.9.0", "hs-connectors==0.9.0",  # with --no-deps: they ask for other versions
#     "tiktoken",
#     "aiohttp", "datasets", "loguru", "openai", "psutil", "pydantic-settings",  # what speculators imports
# ]
# ///
"""Write tests/goldens: outputs of PyTorch reference implementations on tiny random checkpoints.

jaxspec and its tests never import torch; this script needs a separate virtual environment with the packages
above. See tests/goldens/README.md for the cases.

    python scripts/make_goldens.py [NAME ...] [--check] [--eagle-repository PATH]
        [--head-repository PATH ...]
"""

import argparse
import filecmp
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import transformers
from goldens import (
    deepseek_v4_mtp,
    deepseek_v4_targets,
    dflash_heads,
    eagle1_heads,
    eagle3_exported,
    eagle3_safeailab,
    eagle3_speculators,
    eagle_repository,
    gemma4_assistants,
    head_repositories,
    mtp_layers,
    peagle_heads,
    quantized_targets,
    real_models,
    targets,
    tokenizer_folders,
)
from goldens.target_cases import CASES

MAKERS = {case: partial(targets.write, case=case) for case in CASES} | {
    "gemma4-assistants": gemma4_assistants.write,
    "quantized": quantized_targets.write,
    "deepseek-v4": deepseek_v4_targets.write,
    "smollm2": real_models.write_smollm2,
    "gemma3-270m": real_models.write_gemma3,
    "eagle3-speculators": eagle3_speculators.write,
    "eagle3-safeailab": eagle3_safeailab.write,
    "eagle3-exported": eagle3_exported.write,
    "eagle1": eagle1_heads.write,
    "peagle": peagle_heads.write,
    "dflash": dflash_heads.write,
    "mtp": mtp_layers.write,
    "deepseek-v4-mtp": deepseek_v4_mtp.write,
    "tokenizers": tokenizer_folders.write,
}
"""By the name of a target, or of several goldens that are made together."""
NEWER = "gemma4-assistants"
"""Made only by name: it needs transformers 5.24.0."""
GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; default: all but {NEWER}"
    )
    parser.add_argument(
        "--check", action="store_true", help="write to a temporary folder and compare byte for byte"
    )
    parser.add_argument(
        "--eagle-repository",
        type=Path,
        help="then compare the goldens with the models of this checkout of SafeAILab/EAGLE",
    )
    parser.add_argument(
        "--head-repository",
        type=Path,
        action="append",
        default=[],
        help="the same with DFlash and DSpark heads and deepseek-ai/DeepSpec, SpecForge or JetSpec",
    )
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(MAKERS)):
        parser.error(f"unknown golden {unknown[0]!r}; known: {', '.join(MAKERS)}")

    torch.set_num_threads(1)  # the order of float32 sums depends on the number of threads
    torch.use_deterministic_algorithms(True)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) if args.check else GOLDENS
        for name in args.names or [each for each in MAKERS if each != NEWER]:
            MAKERS[name](root)
        status = compare(root) if args.check else 0
    if args.eagle_repository:
        eagle_repository.compare(GOLDENS, args.eagle_repository)
    for repository in args.head_repository:
        print(f"{repository}: equal to {', '.join(head_repositories.compare(GOLDENS, repository))}")
    return status


def compare(written: Path) -> int:
    """Returns 1 if a file under `written` differs from the goldens or is missing there, else 0."""
    files = [path.relative_to(written) for path in sorted(written.rglob("*")) if path.is_file()]
    _, different, missing = filecmp.cmpfiles(written, GOLDENS, files, shallow=False)
    for path in sorted(different + missing):
        print(f"differs: {path}")
    print(f"{len(files)} files, {len(different)} different, {len(missing)} missing")
    return 1 if different or missing else 0


if __name__ == "__main__":
    sys.exit(main())
