"""Chat templates: messages to the text, and the tokens, that a model was trained on.

A template is a Jinja program that comes with the model (``chat_template.jinja``,
``tokenizer_config.json``, or a GGUF file's metadata). It runs in a sandbox and gives the same text as
``transformers``. The tokens are those of that text too, with one difference that matters: markup in what
people wrote stays text. A user who writes ``<|im_end|>`` sends ten characters, not the end of a message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xinfer_vk.errors import ModelError, UsageError, setting
from xinfer_vk.fields import parse_json, quoted
from xinfer_vk.text.origin import MODEL, TEMPLATE, UNKNOWN, USER, origin_of, traced
from xinfer_vk.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xinfer_vk.text.sandbox import ChatEnvironment
    from xinfer_vk.weights.source import ModelSource

Message = Mapping[str, Any]

MAX_TEMPLATE_BYTES = 1 << 18
GGUF_KEY = "tokenizer.chat_template"

# Templates build markup from these names, as in '<|' + role + '|>'. Any other role is a stranger's text.
ROLES = frozenset({"assistant", "developer", "function", "ipython", "system", "tool", "user"})

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of it in messages, the first one counts

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_MARKUP = ("<|im_start|>", "<|im_end|>")
QWEN_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\n" + QWEN_SYSTEM + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def qwen_chat_prompt(system: str | None, user: str) -> str:
    """The ChatML text of Qwen2.5 for one question. Without a system text (None) it has Qwen's own; an empty
    one stays empty. For text that is trusted: use :func:`encode_chat` for what people wrote."""
    system = QWEN_SYSTEM if system is None else system
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )


class ChatTemplate:
    """A chat template. ``where`` names its origin in errors; ``special_texts`` are the variables
    ``bos_token``, ``eos_token``, … that it may use. ``unusable``: why there is none to render, though the
    model is made for chats. It is compiled when it is first needed."""

    def __init__(
        self,
        text: str,
        where: str,
        special_texts: Mapping[str, str] | None = None,
        *,
        fallback: bool = False,
        unusable: str | None = None,
    ) -> None:
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{where}: the chat template is {len(text)} characters long, that is damage")
        self.text, self.where, self.fallback, self.unusable = text, where, fallback, unusable
        self.special_texts = dict(special_texts or {})
        self._lock = threading.Lock()
        self._compiled: tuple[ChatEnvironment, Any] | None = None

    @classmethod
    def from_source(cls, source: ModelSource) -> ChatTemplate:
        """The template of an open model; Qwen2.5's if it has none (``fallback`` is true then).

        Raises :class:`ModelError` if what should be a template is none. Of several of which none is the usual
        one the result is ``unusable``: raw prompts need none.
        """
        if source.kind == "gguf":
            return template_from_gguf(source.metadata, str(source.path))
        try:
            return template_from_directory(source.path)
        except _NoDefault as error:
            return cls("", str(source.path), unusable=str(error))

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a chat.

        ``messages``: ``{"role": …, "content": …}`` each. ``variables`` (``tools``, ``documents``, …) are
        seen by the template. Raises :class:`ModelError`, which names the template, when it fails, when
        it refuses the messages, or when it does not come to an end.
        """
        return str.__str__(self._render(messages, add_generation_prompt, variables))

    def check(self) -> None:
        """Raise :class:`ModelError` if the template cannot be compiled."""
        with self._lock:
            try:
                self._compile()
            except Exception as e:  # Jinja's, or Python's compiler's: too deep, a number too long
                raise ModelError(f"{self.where}: the chat template failed: {_one_line(str(e))}") from None

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise :class:`UsageError` for a name that the template does not use, or that is not to be set."""
        for name in names:
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise UsageError(
                    f"{self.where}: the chat template has no variable {quoted(name)} to set; it has {known}"
                )

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of what a caller may set: ``tools``, ``enable_thinking`` and the like. What the template
        sets before it looks at it is none of them."""
        from jinja2 import meta

        with self._lock:
            try:
                environment, _ = self._compile()
                tree = environment.parse(self.text)
                used = meta.find_undeclared_variables(tree)
                first_use: dict[str, str] = {}
                for name in _names(tree):
                    first_use.setdefault(name.name, name.ctx)
            except Exception:  # Jinja's, or Python's compiler's; rendering will say what is wrong with it
                return frozenset()
        given = {"messages", "add_generation_prompt", *environment.globals, *self.special_texts}
        return frozenset(name for name in used if first_use.get(name) == "load") - given

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The text, with the origin of every character."""
        from jinja2 import TemplateError

        from xinfer_vk.text.budget import Budget

        if self.unusable is not None:
            raise ModelError(self.unusable)
        inputs = {
            "tools": None,
            "documents": None,
            **traced(dict(variables), USER),
            "messages": [_traced_message(message) for message in _checked(messages)],
        }
        with self._lock:
            try:
                environment, template = self._compile()
                environment.budget = Budget(inputs)
                return template.render(
                    **traced(self.special_texts, TEMPLATE),
                    **inputs,
                    add_generation_prompt=add_generation_prompt,
                )
            except TemplateError as e:
                why = str(e) or type(e).__name__
            except Exception as e:  # a template can raise anything: it divides, looks up, calls itself
                why = f"{type(e).__name__}: {e}"
        raise ModelError(f"{self.where}: the chat template failed: {_one_line(why)}")

    def _compile(self) -> tuple[ChatEnvironment, Any]:
        if self._compiled is None:
            from xinfer_vk.text.sandbox import ChatEnvironment

            environment = ChatEnvironment()
            self._compiled = environment, environment.from_string(self.text)
        return self._compiled


def _names(node: Any) -> Iterator[Any]:
    """The names in a parsed template in the order of their use: those of a value before what it is set to."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    for child in reversed(children) if isinstance(node, (nodes.Assign, nodes.AssignBlock)) else children:
        yield from _names(child)


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """Token ids of a chat, ready for the model.

    They are those of ``template.render(messages)``, except that added tokens are read only where the
    template wrote them. In messages of the role "assistant", which the model wrote, those of its added
    tokens count too that are not special: the tags it thinks or calls tools in.
    """
    if template.fallback and any(tokenizer.id_of(text) is None for text in QWEN_MARKUP):
        raise UsageError(
            f"{template.where}: the model has no chat template, and its vocabulary has no {QWEN_MARKUP[0]}: "
            f"use {setting('raw', True)}, or an instruct model"
        )
    text = template._render(messages, add_generation_prompt, variables)
    origin = origin_of(text)
    plain = str.__str__(text)
    if UNKNOWN in origin:
        _refuse_lost_markup(tokenizer, template, plain, origin, (messages, variables))
    return tokenizer.encode_traced(plain, origin)


def is_instruct(source: ModelSource) -> bool:
    """Whether a model is made for chats: whether it has a chat template."""
    return not ChatTemplate.from_source(source).fallback


def template_from_gguf(metadata: Mapping[str, Any], where: str) -> ChatTemplate:
    """The template in a GGUF file's metadata; ``where`` names the file."""
    from xinfer_vk.text.gguf_tokenizer import named_texts

    text = metadata.get(GGUF_KEY)
    if text is not None and not isinstance(text, str):
        raise ModelError(f"{where}: {GGUF_KEY} is {quoted(text)}, text was expected")
    return _template(text, f"{where}: {GGUF_KEY}", where, named_texts(metadata))


def template_from_directory(path: Path) -> ChatTemplate:
    """The template of a directory in Hugging Face layout: ``chat_template.jinja``, else what
    ``tokenizer_config.json`` or ``chat_template.json`` has."""
    from xinfer_vk.text.hf_tokenizer import CONFIG_FILE, named_tokens, tokenizer_config
    from xinfer_vk.weights.mapped import read_small_file

    config = tokenizer_config(path)
    text, where = None, path / "chat_template.jinja"
    if where.exists():
        try:
            text = read_small_file(where, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as e:
            raise ModelError(f"{where}: not UTF-8 text (byte {e.start})") from None
    if not text:
        where = path / CONFIG_FILE
        text = _default_of(config.get("chat_template"), str(where))
    if not text and (path / "chat_template.json").exists():
        where = path / "chat_template.json"
        values = parse_json(read_small_file(where, MAX_TEMPLATE_BYTES), str(where))
        text = _default_of(values.get("chat_template"), str(where))
    return _template(text, str(where), str(path), named_tokens(path, config))


def _template(text: str | None, where: str, model: str, special_texts: Mapping[str, str]) -> ChatTemplate:
    if not text:
        return ChatTemplate(QWEN_TEMPLATE, model, special_texts, fallback=True)
    return ChatTemplate(text, where, special_texts)


class _NoDefault(ModelError):
    """There are several templates, and none is said to be the usual one."""


def _default_of(value: Any, where: str) -> str | None:
    """A template, or the one named "default" of a list of ``{"name": …, "template": …}``, or nothing."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    ):
        raise ModelError(
            f"{where}: chat_template is {quoted(value)}, a template or a list of named ones was expected"
        )
    named = {entry["name"]: entry["template"] for entry in value}
    if "default" not in named and len(named) > 1:
        names = quoted(", ".join(named))
        raise _NoDefault(
            f"{where}: chat_template has the templates {names}, none is named 'default': "
            f"use {setting('raw', True)}"
        )
    return named.get("default", next(iter(named.values()), None))


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    if not messages:
        raise UsageError("there are no messages: a chat needs at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(
                f"message {i} is {quoted(message)}, a mapping with 'role' and 'content' is wanted"
            )
    return messages


def _traced_message(message: Message) -> dict[str, Any]:
    """A message as templates get it: without what is None, for which they are not made, and with the model's
    reasoning under both of its usual names. So does transformers."""
    given = {key: value for key, value in message.items() if value is not None}
    for name in REASONING:
        if name in given:
            given = {"thinking": given[name], **given, "reasoning_content": given[name]}
            break
    role = message["role"]
    out = traced(given, MODEL if role == "assistant" else USER)
    if role in ROLES:
        out["role"] = traced(role, TEMPLATE)
    return out


def _refuse_lost_markup(
    tokenizer: Tokenizer, template: ChatTemplate, text: str, origin: bytes, inputs: Any
) -> None:
    """A template may put its markup through an operation that forgets where it came from. Encoding that
    as text would ruin the prompt without a word."""
    for start, end in tokenizer.markup_in(text):
        if UNKNOWN in origin[start:end] and not _occurs(text[start:end], inputs):
            raise ModelError(
                f"{template.where}: cannot tell whether the template or a message wrote "
                f"{quoted(text[start:end])}: the template formats it in a way that is not supported"
            )


def _occurs(text: str, inputs: Any) -> bool:
    """In any case: templates change it."""
    if isinstance(inputs, str):
        return text.lower() in inputs.lower()
    if isinstance(inputs, Mapping):
        return any(_occurs(text, value) for value in inputs.values())
    return isinstance(inputs, (list, tuple)) and any(_occurs(text, value) for value in inputs)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + "…"
