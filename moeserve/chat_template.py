"""Chat templates: Jinja text that comes with a checkpoint, compiled once and rendered in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template is missing, or refuses these messages."""


class ChatTemplate:
    """One template of a checkpoint with the special tokens it may name (`bos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Text of the conversation; `variables` reach the template under their own names.

        Raises ChatTemplateError where the template refuses the messages or trips over them.
        """
        context: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **variables}
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except Exception as error:  # a template runs the checkpoint's code on the user's data
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; when serving, its body is all that matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The names and filters that the templates of Hugging Face checkpoints expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - the templates' name for it
    return datetime.now().strftime(format)
