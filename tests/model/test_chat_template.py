"""Chat templates render as in transformers, refuse with their own message, and stay in their sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from servekit.config.errors import ConfigError
from servekit.model.chat_template import ChatTemplate, ChatTemplateError, load_chat_template
from servekit.model.gguf_header import read_gguf_header
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.tokenizer import load_tokenizer

CHATML = ("{% for message in messages %}{% if loop.first and message.role != 'system' %}<|im_start|>system\nBe brief."
          "<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
ALTERNATING = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
WITH_TOOLS = """{%- if tools %}
    {{- "<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{ tool | tojson }}
    {%- endfor %}
    {{- "</tools>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.last < 0 %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}{%- endgeneration %}
    {%- elif message.content is string %}
        {{- message.role }}: {{ message.content }}{{ " (last)" if loop.index0 == ns.last }}
    {%- else %}
        {%- for part in message.content if part.type == "text" %}{{ part.text }}{% endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<think>\\n\\n</think>" if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""
INDENTED = """
{% for message in messages %}
    {# trim_blocks and lstrip_blocks decide what is left of this #}
    {% if message.role == "user" %}
  U {{ message.content }}
    {% else %}
  A {{ message.content | upper }}
    {% endif %}
{% endfor %}
"""
USER = {"role": "user", "content": " Hi <b> & 'é' 你\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nso\n</think>\n\nHello"}
TOOL = {"type": "function", "function": {"name": "f", "description": "Größe <x> & 'y'", "parameters": {
    "type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}}}


def by_transformers(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    rendered: str = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
    return rendered


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, WITH_TOOLS, INDENTED])
@pytest.mark.parametrize("messages", [[USER], [USER, ASSISTANT], [USER, ASSISTANT, USER]])
@pytest.mark.parametrize("variables", [
    {"add_generation_prompt": True}, {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": [TOOL], "enable_thinking": False}])
def test_renders_as_transformers_does(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> None:
    assert ChatTemplate(template).render(messages, bos_token="<s>", eos_token="</s>",
                                         **variables) == by_transformers(template, messages, **variables)


def test_content_in_parts_reaches_the_template() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert ChatTemplate(WITH_TOOLS).render(messages, add_generation_prompt=False) == "ab"


def test_the_date_is_at_hand() -> None:
    template = "{{ strftime_now('%Y') }}"
    assert ChatTemplate(template).render([USER], add_generation_prompt=False) == by_transformers(template, [USER])


def test_the_templates_own_message_is_raised() -> None:
    with pytest.raises(ChatTemplateError, match=r"^Roles must alternate user/assistant/user/\.\.\.$"):
        ChatTemplate(ALTERNATING).render([ASSISTANT], add_generation_prompt=True)


@pytest.mark.parametrize(("template", "messages"), [
    ("{{ 'a' + messages[0].content }}", [{"role": "user"}]), ("{{ 'a' + messages[0].content }}", []),
    ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": None}]),
    ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": [1]}]), ("{{ 1 / 0 }}", []),
    ("{{ raise_exception('') }}", [])])
def test_any_failure_is_one_line_for_the_client(template: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match=r"^[^\n]+$"):
        ChatTemplate(template).render(messages, add_generation_prompt=True)


@pytest.mark.parametrize("attack", [
    "{{ messages.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__ }}", "{{ self.__init__.__globals__ }}", "{{ cycler.__init__.__globals__.os }}",
    "{{ ('{0.__class__}').format(1) }}", "{{ ''|attr('__class__') }}", "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}", "{% set _ = messages.clear() %}", "{{ range(10 ** 9) | length }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}"])
def test_the_sandbox_holds(attack: str) -> None:
    messages = [dict(USER)]
    try:
        rendered = ChatTemplate(attack).render(messages, add_generation_prompt=True)
    except ChatTemplateError:
        rendered = ""
    assert rendered == ""
    assert messages == [USER]


def test_invalid_jinja_names_the_line() -> None:
    with pytest.raises(ChatTemplateError, match=r"^line 2: "):
        ChatTemplate("a\n{% if %}")


def folder_model(folder: Path, **config: object) -> LocalModel:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return LocalModel(SourceKind.folder, "m", folder)


def rendered(local: LocalModel, override: str | None = None) -> str | None:
    template = load_chat_template(local, override)
    return template and template.render([USER], add_generation_prompt=True)


class TestLoading:
    def test_from_tokenizer_config(self, tmp_path: Path) -> None:
        assert rendered(folder_model(tmp_path, chat_template="own")) == "own"

    def test_from_a_list_of_named_templates(self, tmp_path: Path) -> None:
        templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        assert rendered(folder_model(tmp_path, chat_template=templates)) == "d"
        assert rendered(folder_model(tmp_path, chat_template=templates[:1])) is None

    def test_a_file_beside_it_comes_first(self, tmp_path: Path) -> None:
        (tmp_path / "chat_template.jinja").write_text("é{# #}")
        assert rendered(folder_model(tmp_path, chat_template="own")) == "é"

    def test_from_gguf(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_chat_template("g")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert rendered(LocalModel(SourceKind.gguf, "m", tmp_path / "m.gguf")) == "g"

    def test_a_model_without_one(self, tmp_path: Path) -> None:
        assert load_chat_template(folder_model(tmp_path)) is None

    def test_an_override_replaces_the_models_own(self, tmp_path: Path) -> None:
        (tmp_path / "mine.jinja").write_text("mine")
        assert rendered(folder_model(tmp_path, chat_template="own"), str(tmp_path / "mine.jinja")) == "mine"

    @pytest.mark.parametrize(("content", "message"), [
        (None, "it cannot be read"), (b"\xff", "it cannot be read"), (b"{% if %}", "it is not valid Jinja .line 1: ")])
    def test_a_wrong_override_is_a_configuration_error(self, tmp_path: Path, content: bytes | None,
                                                       message: str) -> None:
        if content is not None:
            (tmp_path / "mine.jinja").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^model\.chat_template=.*mine\.jinja: {message}"):
            load_chat_template(folder_model(tmp_path), str(tmp_path / "mine.jinja"))

    def test_an_invalid_template_of_the_models_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"the chat template of m is not valid Jinja \(line 1: .*"
                                                 r"model\.chat_template"):
            load_chat_template(folder_model(tmp_path, chat_template="{% if %}"))

    def test_a_dummy_has_one_whose_turns_are_tokens(self) -> None:
        local = LocalModel(SourceKind.dummy, "dummy:tiny", None, "tiny")
        template, tokenizer = load_chat_template(local), load_tokenizer(local)
        assert template is not None and tokenizer.bos is not None
        text = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True,
                               bos_token=tokenizer.bos.text)
        assert tokenizer.encode(text, add_special_tokens=False) == [
            256, 257, *b"user\nHi\n", 257, *b"assistant\n"]

    def test_the_default_models_equals_transformers(self, default_model_path: Path) -> None:
        template = read_gguf_header(default_model_path).metadata["tokenizer.chat_template"]
        local = LocalModel(SourceKind.gguf, "m", default_model_path)
        for messages in ([USER], [{"role": "system", "content": "S"}, USER, ASSISTANT, USER]):
            loaded = load_chat_template(local)
            assert loaded is not None
            assert loaded.render(messages, add_generation_prompt=True) == by_transformers(
                str(template), messages, add_generation_prompt=True)
