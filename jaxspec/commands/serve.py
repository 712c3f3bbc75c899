"""Serve a model over OpenAI's HTTP API: `jaxspec serve` (extra serve).

    jaxspec serve NAME --port 8000

NAME is a configuration's name, a TOML file, a checkpoint folder, a .gguf file or a Hugging Face Hub id. The
server answers /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and /openapi.json, on
this machine only unless --host says otherwise. SIGTERM and Ctrl-C let answers come to their end.

JAXSPEC_API_KEY, or a file given by --api-key-file, holds the key that requests must bring.
Exit status: 0 after SIGTERM; 2 for bad input; 130 after Ctrl-C.
"""

import argparse
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, get_args

from jaxspec.commands.command_line import (
    CommandError,
    Parser,
    add_device_option,
    add_length_option,
    add_sampling_defaults,
    add_speculation_options,
    drafter_from,
    drafter_options,
    model_defaults,
    report,
)
from jaxspec.config import resolve_config
from jaxspec.errors import OneLineError
from jaxspec.installation import optional
from jaxspec.sampling.params import Kind

KEY = "JAXSPEC_API_KEY"
"""The environment variable with the API key. An option would show it to everybody on the machine."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parse(arguments)
    try:
        return _serve(args)
    except (OneLineError, ModuleNotFoundError) as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="jaxspec serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="NAME", help="configuration or checkpoint to load")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: %(default)s")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 takes a free one; default: %(default)s"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="the model's name in requests; default: that of the model"
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=f"in place of {KEY}")
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's origin (https://example.org) that may send requests, * for all; may be given "
        "several times; default: none",
    )
    add_sampling_defaults(parser, "what requests do not say")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-queue",
        type=int,
        default=256,
        metavar="N",
        help="answers that may be running or waiting at once; default: %(default)s",
    )
    limits.add_argument(
        "--max-body",
        type=int,
        default=4 * 2**20,
        metavar="BYTES",
        help="size of a request; default: %(default)s",
    )
    limits.add_argument(
        "--max-prompt", type=int, metavar="N", help="tokens of a prompt; default: as many as fit"
    )
    limits.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for answers to end after SIGTERM; default: %(default)s",
    )
    sizes = parser.add_argument_group("engine")
    sizes.add_argument("--batch-size", type=int, metavar="B", help="answers at once")
    add_length_option(sizes)
    sizes.add_argument("--tensor-parallel", type=int, metavar="M", help="devices to split the model over")
    sizes.add_argument(
        "--prepare",
        type=_kinds,
        default=(),
        metavar="KINDS",
        help="what requests will ask for, so that none of them waits until it is compiled: some of "
        f"{','.join(get_args(Kind))}",
    )
    parser.add_argument(
        "--drafter", metavar="DRAFTER", help="as for jaxspec; default: that of the configuration"
    )
    add_device_option(parser)
    add_speculation_options(parser)
    args = parser.parse_args(arguments)
    if args.no_speculation:
        parser.refuse(args, ["drafter"], "with --no-speculation")
    return args


def _serve(args: argparse.Namespace) -> int:
    _check_ranges(args)
    key = _api_key(args.api_key_file)
    config = resolve_config(args.model)
    drafter = {} if args.drafter is None else drafter_from(args.drafter, option="--drafter")
    drafter |= drafter_options(args, config.replace(drafter=drafter))
    given = {name: getattr(args, name) for name in ("batch_size", "max_model_len", "tensor_parallel")}
    engine = {name: value for name, value in given.items() if value is not None}
    config.replace(engine=engine)
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        optional(module, extra="serve")
    sampling = model_defaults(args.model) if args.sampling_defaults else {}
    # Before the model is loaded, which may take minutes.
    listening = _bind(args.host, args.port)
    name = args.name or (config.name if Path(args.model).exists() else args.model)
    with listening:
        load = {"drafter": drafter, "device": args.device, **engine}
        return _run(args, listening, name, key, load, sampling)


def _run(
    args: argparse.Namespace,
    listening: socket.socket,
    name: str,
    key: str | None,
    load: dict[str, Any],
    sampling: dict[str, Any],
) -> int:
    import jaxspec
    from jaxspec.service.serve.app import Access, make_app
    from jaxspec.service.serve.server import run_server

    engine = jaxspec.AsyncEngine(jaxspec.load(args.model, **load), max_unfinished=args.max_queue)
    access = Access(key, tuple(args.cors_origin), args.max_body, args.max_prompt)
    host, port = listening.getsockname()[:2]
    if key is None and not ipaddress.ip_address(host).is_loopback:
        print(
            f"warning: everybody who reaches {host} can use this server; set {KEY} to ask for a key",
            file=sys.stderr,
        )
    address = f"[{host}]" if ":" in host else host
    try:
        engine.engine.prepare(*args.prepare)
        print(f"serving {name} at http://{address}:{port}/v1", file=sys.stderr, flush=True)
        app = make_app(engine, name, access, sampling)
        ended_by = run_server(app, engine, listening, grace=args.grace)
    finally:
        engine.engine.close()
    return 130 if ended_by == signal.SIGINT else 0


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    known = get_args(Kind)
    for kind in kinds:
        if kind not in known:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(known)}")
    return kinds


def _check_ranges(args: argparse.Namespace) -> None:
    for option, low, high in (
        ("port", 0, 65535),
        ("max_queue", 1, None),
        ("max_body", 1, None),
        ("max_prompt", 1, None),
        ("grace", 0, 86_400),
    ):
        value = getattr(args, option)
        if value is not None and not (value >= low and (high is None or value <= high)):
            span = f"at least {low}" if high is None else f"{low} to {high}"
            raise CommandError(f"--{option.replace('_', '-')} must be {span}, got {value}")


def _api_key(file: Path | None) -> str | None:
    """The key that requests must bring; None if none is asked for.

    Raises:
      CommandError: it cannot be read, or is empty or not plain ASCII, as headers are.
    """
    where = KEY if file is None else f"--api-key-file {file}"
    try:
        key = os.environ.get(KEY) if file is None else file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise CommandError(f"{where}: a key is printable ASCII without spaces, and not empty")
    return key


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address.

    Raises:
      CommandError: there is no such address here, or it is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise CommandError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise CommandError(f"--host {host} --port {port}: {error.strerror}") from None
    return bound
