"""YAML files, read as a user means them: no key twice, and no more values than the file shows."""

from collections.abc import Container, Iterator
from typing import Any

import yaml

MOST_VALUES = 10_000  # of a YAML file


def read_yaml(text: str) -> Any:
    """Return what a YAML text stands for; raise YAMLError, or ValueError for a key that is there
    twice and for too many values."""
    return _read(text, _Loader)


def read_texts(text: str) -> Any:
    """Return what `read_yaml` does, with every number, date and truth value as it is written."""
    return _read(text, _TextLoader)


def _read(text: str, loader_class: "type[_Loader]") -> Any:
    loader = loader_class(text)
    try:
        content = loader.get_single_data()
    finally:
        loader.dispose()
    _check_size(content)
    return content


def flatten(
    content: dict, lists: set[str], groups: Container[str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield nested entries with dotted names.

    lists: flags whose items may be mappings. groups: names of groups, which have no entries if they
    are empty.
    """
    for name, value in content.items():
        if value is None and name in groups:
            continue
        if isinstance(value, dict) and f"{prefix}{name}" not in lists:
            yield from flatten(value, lists, groups, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value


def as_text(value: Any) -> str:
    """Return a YAML value in the form of the command line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that a mapping has twice: the first value would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping; raise ValueError for a key that is there twice."""
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                continue
            if key.value in names:
                raise ValueError(
                    f"{key.value} is there twice (line {key.start_mark.line + 1}); write it once"
                )
            names.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the pairs of merged mappings (<<) before a mapping's own, which win.

        PyYAML's own form lets the last of several merged mappings win, where YAML has the first,
        and loses a pair of a merged mapping that was merged itself.
        """
        own = []
        merged = []
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own.append((key, value))
                continue
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for part in reversed(parts):
                if not isinstance(part, yaml.MappingNode):
                    raise ValueError(
                        "<<: what is merged is no mapping; name one (&name) and merge *name"
                    )
                self.flatten_mapping(part)
                merged += part.value
        node.value = merged + own


class _TextLoader(_Loader):
    """Reads numbers, dates, truth values and bytes as text."""


for _kind in ("bool", "int", "float", "timestamp", "binary"):
    _TextLoader.add_constructor(
        f"tag:yaml.org,2002:{_kind}", _TextLoader.construct_yaml_str
    )


def _check_size(content: Any) -> None:
    """Raise ValueError if a YAML file stands for more than MOST_VALUES values: nested aliases
    multiply them."""
    count = 0
    waiting = [content]
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(
                f"it stands for more than {MOST_VALUES:,} values; write them without aliases "
                "(&name, *name)"
            )
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
