"""The command line of `moeserve bench`; what it does is imported when it runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_bench_commands(parser: argparse.ArgumentParser) -> None:
    """`serve`: load a running server and report goodput and latencies."""
    commands = parser.add_subparsers(required=True, metavar="action")
    serve = commands.add_parser(
        "serve",
        help="load a running server of the OpenAI API; report goodput and latencies",
        description="Send a load to any server of the OpenAI API, in streams, and report which share of the requests "
        "met their targets. Failed requests never count as good.",
    )
    _add_server(serve.add_argument_group("server"))
    _add_load(serve.add_argument_group("load: one of --rate, --clients, --trace, --profile"))
    _add_lengths(serve.add_argument_group("requests"))
    _add_targets(serve.add_argument_group("targets"))
    _add_outputs(serve.add_argument_group("output"))
    serve.set_defaults(run=_run_serve)


def _add_server(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--url", default="http://127.0.0.1:8000", help="the server (http://127.0.0.1:8000)")
    option("--model", help="default: the first model the server lists")
    option("--api-key", metavar="KEY", help="sent as a bearer token")
    option("--endpoint", choices=("completions", "chat"), default="completions",
           help="completions sends token ids (default), chat sends text")  # fmt: skip
    option("--plain", action="store_true", help="send only fields of OpenAI's own API: answers may end early")
    option("--extra-body", metavar="JSON", default="{}", help="more fields of every request")
    option("--timeout", type=float, default=600.0, metavar="S", help="a request that takes longer has failed (600)")


def _add_load(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--rate", type=float, metavar="R", help="requests a second, sent whatever the server does")
    option("--burstiness", type=float, default=1.0, metavar="B",
           help="of the arrivals: 1 is Poisson (default), below comes in bursts, above is more even")  # fmt: skip
    option("--clients", type=int, metavar="N", help="so many at once, each sending when its last answer has ended")
    option("--trace", type=Path, metavar="FILE", help="replay recorded traffic: Azure's .csv or Mooncake's .jsonl; "
           "at --rate, or --time-scale times as fast as recorded")  # fmt: skip
    option("--time-scale", type=float, metavar="X", help="of a trace (1)")
    option("--profile", choices=("demo-domains",), help="demo-domains: clients that send prose, then code, then "
           "Dutch, and so on until stopped")  # fmt: skip
    option("--domain-seconds", type=float, default=60.0, metavar="S", help="before the next domain (60)")
    option("--duration", type=float, metavar="S", help="of the arrivals (30; a profile: no end)")
    option("--num-requests", type=int, metavar="N", help="at most so many (with --clients: 10 each, without time)")
    option("--seed", type=int, default=0, help="another one draws other requests (0)")


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--prompt-tokens", default="128", metavar="N|LOW:HIGH", help="each prompt (128)")
    option("--output-tokens", default="64", metavar="N|LOW:HIGH", help="each answer (64)")
    option("--length-scale", type=float, default=1.0, metavar="X", help="of a trace's prompts and answers (1)")
    option("--max-prompt-tokens", type=int, metavar="N", help="cut a trace's longer prompts")
    option("--max-output-tokens", type=int, metavar="N", help="cut a trace's longer answers")
    option("--vocab-size", type=int, default=1000, metavar="N", help="token ids are below it (1000)")
    option("--temperature", type=float, help="of the sampling (0; a profile: 1)")


def _add_targets(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--class", dest="classes", action="append", default=[], metavar="NAME[,share=,ttft=,tpot=,e2e=,tenant=]",
           help="requests of a class, targets in seconds; the server is told in headers; may be repeated "
           "(one class with ttft=1,tpot=0.1 that the server is not told of)")  # fmt: skip
    option("--find-max-goodput", action="store_true",
           help="look for the highest rate with enough attainment, from --rate (1) up or down")  # fmt: skip
    option("--attainment", type=float, default=0.95, metavar="SHARE", help="what is enough (0.95)")
    option("--tolerance", type=float, default=0.05, metavar="X", help="how close the rate is looked for (0.05)")


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--json", metavar="FILE", help="everything measured; - is standard output, the tables then go to stderr")
    option("--report", type=Path, metavar="FILE", help="a page or picture, .html, .png or .svg; needs matplotlib")


def _run_serve(arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    from moeserve_launch.bench_serve import run_bench_serve

    return run_bench_serve(arguments)
