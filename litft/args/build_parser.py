"""Make jsonargparse's parser of a command's flags, and the arguments from what it has read.

Every flag is added by itself with `add_argument`: its type and default are those of its field, and
its help text is the docstring below the field.
"""

import dataclasses
import functools
from argparse import SUPPRESS, Action
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import docstring_parser
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from litft.args.finetune_commands import FINETUNE
from litft.args.flag_types import class_of_group

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyArgs = TypeVar("AnyArgs", bound="DataclassInstance")
AddArgument = Callable[..., Action | None]

# the text of jsonargparse, which adds this flag to the parser that reads the command line
PRINT_CONFIG = (
    "Print the configuration after applying all other arguments and exit. The optional flags "
    "customizes the output and are one or more keywords separated by comma. The supported flags "
    "are: skip_default, skip_unset."
)


@dataclass(frozen=True)
class Flag:
    """A flag: its dotted name, its type, its default and its help text."""

    name: str
    type: Any
    default: Any
    help: str | None

    def add(self, add_argument: AddArgument) -> None:
        """Add the flag with the method of a parser, or of a group of its --help."""
        action = add_argument(
            f"--{self.name}", type=self.type, default=self.default, help=self.help
        )
        # jsonargparse returns None for a class without fields, which is the type of no flag
        assert action is not None
        if self.type in (bool, bool | None):
            # the flag alone means true
            action.metavar = "[true|false]"
        # NAME+ would append to a list; here, a list is given as a whole
        options = []
        for option in action.option_strings:
            if not option.endswith("+"):
                options.append(option)
        action.option_strings = options


@functools.cache
def parser_of(cls: "type[DataclassInstance]") -> ArgumentParser:
    """Return the parser that reads the flags of the dataclass `cls`."""
    parser = ArgumentParser(exit_on_error=False)
    all_flags = flags_of(cls)
    # `sweep` has a flag of this name, for its runs
    if not any(flag.name == "config" for flag in all_flags):
        parser.add_argument("--config", action="config")
    for flag in all_flags:
        flag.add(parser.add_argument)
    return parser


def parser_for_help(cls: "type[DataclassInstance]") -> ArgumentParser:
    """Return the parser that answers --help: it has the flags that matter most in a group of their
    own, which comes first.

    It is not `parser_of`, which has the flags in the order of their fields, as --print_config
    prints them.
    """
    parser = ArgumentParser(
        description=cls.__doc__,
        usage="%(prog)s [flags]",
        exit_on_error=False,
        add_help=False,
    )
    flags = {flag.name: flag for flag in flags_of(cls)}
    if cls in FINETUNE.values():
        recipe = ", or the name of a recipe (litft recipes)"
    else:
        recipe = ""
    config_help = f"A YAML file of flags, such as a run's config.yaml{recipe}."
    main_flags: tuple[str, ...] = getattr(cls, "main_flags", ())
    if main_flags:
        group = parser.add_argument_group("the flags that matter most")
        for name in main_flags:
            if name == "config":
                group.add_argument("--config", default=SUPPRESS, help=config_help)
            elif name in flags:
                flags.pop(name).add(group.add_argument)
    group = parser.add_argument_group("options")
    group.add_argument(
        "-h",
        "--help",
        action="help",
        default=SUPPRESS,
        help="Show this help message and exit.",
    )
    if "config" not in main_flags and "config" not in flags:
        group.add_argument("--config", default=SUPPRESS, help=config_help)
    # \b: the terminal shows --print_config[=flags]
    group.add_argument(
        "--print_config", default=SUPPRESS, metavar="\b[=flags]", help=PRINT_CONFIG
    )
    _add_groups(parser, group.add_argument, flags, cls)
    return parser


def _add_groups(
    parser: ArgumentParser,
    add_option: AddArgument,
    flags: dict[str, Flag],
    cls: "type[DataclassInstance]",
) -> None:
    """Add the flags that are not in a group yet: those of a group of `cls` below its title, the
    others with `add_option`."""
    for item in dataclasses.fields(cls):
        group_class = class_of_group(item)
        if group_class is None:
            if item.name in flags:
                flags[item.name].add(add_option)
            continue
        group = parser.add_argument_group(title_of(group_class, item.name))
        for name, flag in flags.items():
            if name.startswith(f"{item.name}."):
                flag.add(group.add_argument)


def title_of(group_class: type, name: str) -> str:
    """Return the title of a group of flags: the first line of its docstring, otherwise `name`."""
    title = docstring_parser.parse(group_class.__doc__ or "").short_description or name
    return title.strip().removesuffix(".")


def args_from(namespace: Namespace, cls: type[AnyArgs], prefix: str = "") -> AnyArgs:
    """Return the dataclass with the values that its parser has read."""
    values = {}
    for item in dataclasses.fields(cls):
        name = f"{prefix}{item.name}"
        group_class = class_of_group(item)
        if group_class is None:
            values[item.name] = namespace[name]
        else:
            values[item.name] = args_from(namespace, group_class, f"{name}.")
    return cls(**values)


def flags_of(
    cls: "type[DataclassInstance]", defaults: Any = None, prefix: str = ""
) -> list[Flag]:
    """Return the flags of a dataclass, in the order of its fields.

    defaults: an instance with the defaults; None for those of the class.
    """
    if defaults is None:
        defaults = cls()
    help_texts = _help_texts(cls)
    flags = []
    for item in dataclasses.fields(cls):
        name = f"{prefix}{item.name}"
        default = getattr(defaults, item.name)
        group_class = class_of_group(item)
        if group_class is None:
            flags.append(Flag(name, item.type, default, help_texts.get(item.name)))
        else:
            flags += flags_of(group_class, default, f"{name}.")
    return flags


def _help_texts(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its bases, by field."""
    texts = {}
    # a text of a class replaces that of its base
    for base in reversed(cls.__mro__[:-1]):
        for param in docstring_parser.parse_from_object(base).params:
            if param.description:
                texts[param.arg_name] = param.description
    return texts


def is_valid(parser: ArgumentParser, word: str) -> bool:
    """Return whether `word`, one --flag=value, has a value of the flag's type."""
    try:
        parser.parse_args([word])
    except (ArgumentError, OverflowError):
        # a whole number beyond the range of floats
        return False
    return True
