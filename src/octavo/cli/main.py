"""Entry point: parse, run one command, turn errors into one line and an exit code.

Exit codes: 0 done, 1 an error that the text explains, 2 wrong arguments, 130 interrupted.
Nothing heavy is imported before a command needs it, so help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from .. import __version__
from ..errors import OctavoError
from .options import Parser, add_sampling, add_settings, filled, normalise, seconds

EXAMPLES = """\
examples:
  octavo serve                             an OpenAI-compatible server at http://127.0.0.1:8000
  octavo chat                              talk to the model in this terminal
  octavo generate --prompt "The capital of France is" --max-tokens 16
  octavo bench throughput --workload requests.json --json
  octavo models                            which models are known and cached
"""


def build_parser() -> Parser:
    """The whole command line; commands are named by module, imported only when run."""
    parser = Parser(
        prog="octavo",
        description="Octavo: an LLM inference engine to read in a day and to run without a GPU.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    _serve(commands.add_parser("serve", help="serve a model over HTTP, in OpenAI's form"))
    _generate(commands.add_parser("generate", help="continue a text"))
    _chat(commands.add_parser("chat", help="talk to a model in this terminal"))
    bench = commands.add_parser("bench", help="measure")
    bench.set_defaults(parser=bench)
    kinds = bench.add_subparsers(title="benchmarks", dest="bench", metavar="BENCHMARK")
    _throughput(kinds.add_parser("throughput", help="run a file of requests, all at once"))
    _models(commands.add_parser("models", help="list known and cached models, fetch one, clear"))
    scenario = commands.add_parser("scenario", help="worked examples of scheduling, drawn")
    _scenario(scenario)
    replay = commands.add_parser("replay", help="run the scheduler over a recording")
    replay.description = (
        "Run the scheduler over a file of --record; its decisions must be the same."
    )
    replay.add_argument("file", metavar="FILE", help="What --record FILE wrote.")
    replay.set_defaults(module="replay", parser=replay)
    return parser


def _serve(parser: Parser) -> None:
    parser.description = "Serve a model over HTTP; the API is OpenAI's."
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("--host", default="127.0.0.1", help="Address to bind. Default: 127.0.0.1.")
    parser.add_argument("--port", type=int, default=8000, help="Port to bind. Default: 8000.")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="Key that clients must send; may be given several times, each a tenant of its own. "
        "Default: $OCTAVO_API_KEY, which no process list shows.",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        type=filled,
        default=[],
        metavar="NAME",
        help="Model name in the API; may be given several times. Default: MODEL.",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="Time that running answers have to finish after Ctrl-C or SIGTERM. Default: 30.",
    )
    add_settings(parser)
    parser.set_defaults(module="serve", parser=parser)


def _generate(parser: Parser) -> None:
    parser.description = "Continue a text as it stands: no chat template. Only text on stdout."
    parser.usage = "%(prog)s [MODEL] --prompt TEXT [flags]"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="Text; - reads stdin.")
    add_sampling(parser, max_tokens=256)
    add_settings(parser)
    parser.set_defaults(module="generate", parser=parser)


def _chat(parser: Parser) -> None:
    parser.description = "Talk to a model. Ctrl-C stops an answer, Ctrl-D leaves, /help helps."
    parser.usage = "%(prog)s [MODEL] [--prompt TEXT] [flags]"
    parser.add_argument(
        "--prompt", metavar="TEXT", help="Answer this once, then exit; - reads stdin."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="System prompt. Default: the template's own."
    )
    add_sampling(parser, max_tokens=1024)
    add_settings(parser)
    parser.set_defaults(module="chat", parser=parser)


def _throughput(parser: Parser) -> None:
    parser.description = "Run a file of requests at once: greedy, past end-of-sequence tokens."
    parser.usage = "%(prog)s [MODEL] --workload FILE [--json] [flags]"
    parser.add_argument(
        "--workload",
        required=True,
        metavar="FILE",
        help='JSON: {"requests": [{"prompt_ids": [...], "max_tokens": N}, ...]}.',
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    add_settings(parser)
    parser.set_defaults(module="bench", parser=parser)


def _models(parser: Parser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "fetch", "clear"), default="list")
    parser.add_argument(
        "name", nargs="?", type=filled, metavar="NAME", help="Alias or hub id, for fetch."
    )
    parser.set_defaults(module="models", parser=parser)


def _scenario(parser: Parser) -> None:
    parser.description = "Play a worked example on the real scheduler, without a model; check it."
    parser.add_argument("action", choices=("list", "run"), help="list them, or run one.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="Default: all.")
    parser.set_defaults(module="scenario", parser=parser)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (help and usage errors leave by SystemExit)."""
    _prepare_stdout()
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader left (say, `| head`)
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is not None:  # no matter of a stream: a fault of ours
            raise
        _drop_output()
        print(f"octavo: can't write the output: {error.strerror or error}", file=sys.stderr)
        return 1


def _prepare_stdout() -> None:
    """A terminal of another encoding gets ? for what it lacks; a closed stdout takes nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
    elif isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """No more output, and none at interpreter exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(arguments: Sequence[str] | None) -> int:
    given = normalise(sys.argv[1:] if arguments is None else arguments)
    args, unknown = build_parser().parse_known_args(given)
    parser: Parser = args.parser
    if unknown:
        parser.refuse_unknown(unknown)
    if getattr(args, "action", None) in ("list", "clear") and args.name is not None:
        parser.refuse_unknown([args.name])
    if getattr(args, "model_flag", None) and args.model:
        parser.error(f"two models: {args.model} and --model {args.model_flag}")
    if not hasattr(args, "module"):
        parser.print_help()
        return 0 if not given else 2
    return run_command(args)


def run_command(args: argparse.Namespace) -> int:
    """Import and run the command; every expected failure becomes one line on stderr."""
    try:
        command: Callable[[argparse.Namespace], int] = import_module(
            f".{args.module}", __package__
        ).run
        return command(args)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"octavo: not enough memory: {str(error) or 'lower the settings'}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
