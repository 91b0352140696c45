"""The command line, `moeserve serve | chat | complete | placement | bench`, and the frontend that `serve` starts.

Exit codes: 0 done, 1 an error the user can mend (one line on stderr), 2 a command line that cannot be read.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from moeserve.config import Config, ConfigError
from moeserve_launch.arguments import add_serve_arguments, config_from_arguments
from moeserve_launch.bench_cli import add_bench_commands
from moeserve_launch.client import add_client_arguments, run_chat, run_complete
from moeserve_launch.placement_cli import add_placement_commands
from moeserve_launch.topology import RankEnvironment


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the process."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(words)
    try:
        code: int = arguments.run(arguments, words)
    except (ConfigError, ConnectionError) as error:
        print(f"moeserve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moeserve", description="Serve Mixture-of-Experts language models.")
    parser.add_argument("--version", action="version", version=f"moeserve {version('moeserve')}")
    commands = parser.add_subparsers(required=True, metavar="command")

    serve = commands.add_parser("serve", help="serve a model over the OpenAI API")
    add_serve_arguments(serve)
    serve.set_defaults(run=_run_serve)

    complete = commands.add_parser("complete", help="continue a prompt on a running server, streaming")
    complete.add_argument("prompt", help="the text to continue; - reads standard input")
    add_client_arguments(complete)
    complete.set_defaults(run=run_complete)

    chat = commands.add_parser("chat", help="talk to a running server")
    chat.add_argument("--system", help="system message to begin with")
    add_client_arguments(chat)
    chat.set_defaults(run=run_chat)

    placement = commands.add_parser("placement", help="expert placement: replay loads, ask for advice")
    add_placement_commands(placement)

    bench = commands.add_parser("bench", help="load a running server and measure it")
    add_bench_commands(bench)

    frontend = commands.add_parser("frontend", help="the HTTP process of `serve` (reads its orders from stdin)")
    frontend.set_defaults(run=_run_frontend)
    return parser


def _run_serve(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """A rank where torchrun started us, else the launcher that runs torchrun for the user."""
    config: Config = config_from_arguments(arguments)
    place = RankEnvironment.from_environ(os.environ)
    if place is not None:
        from moeserve_launch.rank import run_rank

        return run_rank(config, place)
    from moeserve_launch.supervisor import Supervisor

    return Supervisor(config, words).run()


def _run_frontend(_arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    from moeserve_launch.frontend import run_from_stdin

    return run_from_stdin()
