"""Which chat template the data is rendered with, and which one inference uses after training."""

import copy
import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from litft.args import DataArgs
from litft.data.chat_template import STYLES, mentions_variable
from litft.data.encoding_report import EncodingReport
from litft.data.tokenizer import Tokenizer

# variables of chat templates that every program sets
ALWAYS_SET = (
    "messages",
    "tools",
    "add_generation_prompt",
    "strftime_now",
    "raise_exception",
)
ALWAYS_SET += ("bos_token", "eos_token", "unk_token", "pad_token")
# the words of Python for values of JSON
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def with_template(tokenizer: Tokenizer, args: DataArgs) -> tuple[Tokenizer, str]:
    """Return a tokenizer with the chat template and the day of the flags, and where the template
    comes from, for messages."""
    # a copy: the caller's tokenizer stays as its folder describes it
    tokenizer = copy.copy(tokenizer)
    template = choose_template(args.template, tokenizer)
    set_arguments(tokenizer, args.template_args)
    if args.date:
        tokenizer.day = args.date
    elif tokenizer.uses_date or args.has_file_templates:
        # templates of single files may print the date, too
        tokenizer.day = date.today().isoformat()
    else:
        tokenizer.day = None
    return tokenizer, template


def choose_template(choice: str, tokenizer: Tokenizer) -> str:
    """Set the template of `tokenizer`: auto (its own, else Alpaca), the name of a style, or the
    path of a jinja file.

    Return where the template comes from, for messages.
    """
    if choice in STYLES:
        tokenizer.use_template(STYLES[choice])
    elif choice != "auto":
        if not Path(choice).is_file():
            raise ValueError(
                f"--data.template {choice}: no such file; use auto, {', '.join(STYLES)}, or a "
                "jinja file's path"
            )
        try:
            tokenizer.use_template(Path(choice).read_text("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(
                f"--data.template {choice} is not UTF-8 text; name a jinja file"
            ) from None
    if choice == "auto":
        if tokenizer.own_template:
            return "the checkpoint's own"
        return "Alpaca style, since the checkpoint has none"
    return choice


def set_arguments(tokenizer: Tokenizer, items: list[str]) -> None:
    """Set other defaults for variables of all templates of a tokenizer."""
    tokenizer.chat_template = with_arguments(tokenizer.chat_template, items)
    templates = {}
    for name, source in tokenizer.named_templates.items():
        # an argument applies to the templates that mention it; the main one must
        templates[name] = with_arguments(source, mentioned_arguments(source, items))
    tokenizer.named_templates = templates


def mentioned_arguments(source: str, items: list[str]) -> list[str]:
    """Return the arguments, NAME=VALUE each, that a template mentions."""
    known = []
    for item in items:
        if mentions_variable(source, item.partition("=")[0]):
            known.append(item)
    return known


def learned_template(
    tokenizer: Tokenizer, template: str, by_file: Mapping[str, Tokenizer]
) -> tuple[Tokenizer, str]:
    """Return the tokenizer with the template that inference will use, and where it comes from.

    That is the template of the flags, or that of the training files if all share another one.
    by_file: the tokenizers that the files' conversations are rendered with, by label.
    """
    others = []
    for label, of_file in by_file.items():
        if of_file.chat_template != tokenizer.chat_template:
            others.append(label)
    if not others:
        return tokenizer, template
    sources = {of_file.chat_template for of_file in by_file.values()}
    if len(sources) == 1:
        return by_file[others[0]], f"that of {' and '.join(others)}"
    names = " and ".join(others)
    return tokenizer, (
        f"{template}; {names} has another one, which answers after training are not rendered with"
    )


def after_training(
    tokenizer: Tokenizer, of_folder: Tokenizer, reports: Mapping[str, EncodingReport]
) -> Tokenizer:
    """Return a copy of a tokenizer with which generation stops at the special tokens that end a
    turn in the data, even if no file of the model names them. of_folder: as its folder describes
    it."""
    tokenizer = copy.copy(tokenizer)
    if has_conversations(reports):
        tokenizer.has_template = True
    else:
        # the folder's templates stay, and none is invented
        tokenizer.chat_template = of_folder.chat_template
        tokenizer.named_templates = of_folder.named_templates
    ends = {token for report in reports.values() for token in report.ends}
    missing = sorted((ends & tokenizer.special_ids) - set(tokenizer.stop_ids))
    tokenizer.stop_ids = [*tokenizer.stop_ids, *missing]
    return tokenizer


def has_conversations(reports: Mapping[str, EncodingReport]) -> bool:
    """Return whether a record was rendered with the chat template."""
    return any(report.has_conversations for report in reports.values())


def with_arguments(source: str, items: list[str]) -> str:
    """Return a chat template with other defaults for its variables, NAME=VALUE each; a value is
    JSON, or else text.

    They are part of the template, so that every program that renders it has them. Raise ValueError
    for a name that the template does not mention, or that every program sets.
    """
    defaults = ""
    for item in items:
        name, _, value = item.partition("=")
        if name in ALWAYS_SET:
            reason = (
                f"{name} is set by each conversation or by the tokenizer, so a default has no "
                "effect; leave it out"
            )
            raise ValueError(f"--data.template_args {item}: {reason}")
        if not mentions_variable(source, name):
            raise ValueError(
                f"--data.template_args {item}: the chat template has no variable {name}; check the "
                "spelling"
            )
        # Python's spelling, as in transformers' documentation, would be a text, which is true
        value = PYTHON_WORDS.get(value, value)
        try:
            if json.loads(value) is None:
                literal = "none"
            else:
                literal = json.dumps(json.loads(value))
        except ValueError:
            literal = json.dumps(value)
        setting = f"{{%- set {name} = {literal} %}}"
        defaults += f"{{%- if {name} is not defined %}}{setting}{{%- endif %}}"
    return defaults + source
