"""Chat templates: from messages to the text a model was trained on.

A template is a Jinja program that comes with the model, so it is untrusted: it runs in Jinja's immutable sandbox,
where it can neither reach Python's internals nor change its arguments. Jinja bounds `range` to 100,000 steps; a
template can still nest loops and take long, so one from an untrusted source should be read before it is served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from servekit.config.errors import ConfigError
from servekit.model.gguf_header import read_gguf_header
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.tokenizer import DUMMY_TURN, read_json


class ChatTemplateError(ValueError):
    """A template refused the messages, or failed on them: its own message, in one line, for the client."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """Compile `source`. Raises ChatTemplateError if it is not valid Jinja."""
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, bos_token: str = "",
               eos_token: str = "", tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any) -> str:
        """The prompt's text, for `Tokenizer.encode(text, add_special_tokens=False)`.

        Args:
            messages: Role and content each, oldest first.
            add_generation_prompt: Whether to open the assistant's turn at the end.
            bos_token, eos_token: Texts of the tokenizer's special tokens, empty if it has none.
            tools: Descriptions of the functions that the model may call.
            variables: Whatever else the template knows, such as `enable_thinking`.

        Raises ChatTemplateError with the template's own message if it refuses or fails.
        """
        try:
            return self._template.render(
                {"documents": None, **variables, "messages": messages, "tools": tools,
                 "add_generation_prompt": add_generation_prompt, "bos_token": bos_token, "eos_token": eos_token})
        except Exception as error:  # a template is a program: anything may happen in it
            raise ChatTemplateError(" ".join(str(error).split()) or type(error).__name__) from error


def load_chat_template(local: LocalModel, override: str | None = None) -> ChatTemplate | None:
    """The template of a model, or the one in the file that `model.chat_template` names; None if there is none.

    Raises ConfigError for a wrong `override`, ModelFileError for a template of the model's that is not valid.
    """
    if override is not None:
        return _load_override(Path(override).expanduser())
    source = _source(local)
    if source is None:
        return None
    try:
        return ChatTemplate(source)
    except ChatTemplateError as error:
        raise ModelFileError(f"the chat template of {local.name} is not valid Jinja ({error}); set "
                             "model.chat_template to a file with a corrected one") from error


def _load_override(path: Path) -> ChatTemplate:
    remedy = "name a file with a Jinja template or set model.chat_template=null"
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"))
    except ChatTemplateError as error:
        raise ConfigError("model.chat_template", path, f"it is not valid Jinja ({error})", remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("model.chat_template", path, f"it cannot be read ({error})", remedy) from error


def _source(local: LocalModel) -> str | None:
    match local.kind:
        case SourceKind.folder:
            file = local.files / "chat_template.jinja"
            if file.is_file():
                return file.read_text(encoding="utf-8")
            return _default_of(read_json(local.files / "tokenizer_config.json").get("chat_template"))
        case SourceKind.gguf:
            return _default_of(read_gguf_header(local.files).metadata.get("tokenizer.chat_template"))
        case SourceKind.dummy:
            return _DUMMY_TEMPLATE


def _default_of(entry: object) -> str | None:
    """A `chat_template` entry: a template, or a list of named ones of which `default` is taken."""
    if isinstance(entry, list):
        return next((template["template"] for template in entry if template["name"] == "default"), None)
    return entry if isinstance(entry, str) else None


_DUMMY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}" + DUMMY_TURN + "{{ message.role }}\n{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}" + DUMMY_TURN + "assistant\n{% endif %}"
)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for: that of transformers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
