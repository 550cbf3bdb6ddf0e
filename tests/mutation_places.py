"""Where a piece of code is in a file, by its syntax tree: spacing, line breaks, comments and
positions do not matter.

A place is named by a function (`Decoder.step`; a class; or nothing for the module) and by code: an
expression, one or more statements, or the header of a compound statement (`if x:`), in the function
itself and not in functions within it.
"""

import ast
import copy
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_CONTEXT = re.compile(r",? ?(Load|Store|Del)\(\)")


@dataclass(frozen=True)
class Place:
    """A region of a file's text."""

    function: str
    start: int
    end: int
    is_expression: bool


@dataclass(frozen=True)
class Pattern:
    """The normalized form of a piece of code."""

    kind: str  # expression, statements or header
    dumps: tuple[str, ...]
    keyword: str = ""  # elif; the tree does not tell it from if


def dump(node: ast.AST) -> str:
    """Return a node's tree as text, in which only the syntax counts."""
    return _CONTEXT.sub("", ast.dump(node, annotate_fields=False))


def header(node: ast.AST) -> ast.AST:
    """Return a compound statement without its bodies."""
    bare = copy.copy(node)
    for name in BODIES:
        if hasattr(bare, name):
            setattr(bare, name, [])
    return bare


def is_compound(node: ast.AST) -> bool:
    """Whether a node is a statement, or a handler, with a body of its own."""
    # neither a module nor a case of `match`, which have no place of their own
    is_statement = isinstance(node, ast.stmt | ast.ExceptHandler)
    return is_statement and isinstance(getattr(node, "body", None), list)


def is_expression(code: str) -> bool:
    """Whether code is one expression."""
    try:
        ast.parse(code, mode="eval")
    except SyntaxError:
        return False
    return True


def parse_pattern(code: str) -> Pattern:
    """Return the pattern of a piece of code.

    Raises SyntaxError if it is none of the three kinds.
    """
    code = textwrap.dedent(code).strip()
    try:
        statements = ast.parse(code).body
    except SyntaxError:
        return _header_pattern(code)
    if len(statements) == 1 and isinstance(statements[0], ast.Expr):
        return Pattern("expression", (dump(statements[0].value),))
    return Pattern("statements", tuple(dump(statement) for statement in statements))


def _header_pattern(code: str) -> Pattern:
    """Return the pattern of a header: `for x in y:`, `elif x:` or `except ValueError:`."""
    if code.startswith("except"):
        node: ast.AST = ast.parse(f"try:\n    pass\n{code}\n    pass").body[0].handlers[0]
    elif code.startswith("elif"):
        node = ast.parse(f"{code.removeprefix('el')}\n    pass").body[0]
    else:
        node = ast.parse(f"{code}\n    pass").body[0]
    return Pattern(
        "header", (dump(header(node)),), "elif" if code.startswith("elif") else ""
    )


class Source:
    """A Python file's text and its functions."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        # as Python does; splitlines would also split at U+2028
        self._lines = text.split("\n")
        self._line_starts = [0]
        for line in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self.scopes: list[tuple[str, ast.AST]] = [("", self.tree)]
        self._add_scopes(self.tree, "")

    def _add_scopes(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, SCOPES):
                name = f"{prefix}{child.name}"
                self.scopes.append((name, child))
                self._add_scopes(child, f"{name}.")
            else:
                self._add_scopes(child, prefix)

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a position; column: in bytes of UTF-8, as in the tree."""
        text = self._lines[line - 1]
        return self._line_starts[line - 1] + len(text.encode()[:column].decode())

    def start(self, node: ast.AST) -> int:
        """Return where a node begins, with its decorators."""
        decorators = getattr(node, "decorator_list", None)
        if decorators:
            return self.text.rindex(
                "@", 0, self.offset(decorators[0].lineno, decorators[0].col_offset)
            )
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.AST) -> int:
        """Return where a node ends."""
        return self.offset(node.end_lineno, node.end_col_offset)

    def header_end(self, node: ast.AST) -> int:
        """Return where the header of a compound statement ends, after its colon."""
        last = self.start(node)
        for child in ast.walk(header(node)):
            if (
                child is not node
                and hasattr(child, "end_lineno")
                and not is_compound(child)
            ):
                last = max(last, self.end(child))
        return self.text.index(":", last) + 1

    def nodes(self, scope: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes of a scope, with the headers of the functions and classes in it, but not
        their bodies."""
        waiting = [scope]
        while waiting:
            node = waiting.pop()
            yield node
            # Python before 3.12 has wrong positions within f-strings
            if isinstance(node, ast.JoinedStr):
                continue
            is_inner = isinstance(node, SCOPES) and node is not scope
            waiting.extend(ast.iter_child_nodes(header(node) if is_inner else node))

    def find(self, function: str, pattern: Pattern) -> list[Place]:
        """Return the places in a function that have the pattern."""
        places = []
        for name, scope in self.scopes:
            if name == function:
                places += self._find_in(name, scope, pattern)
        return places

    def _find_in(self, function: str, scope: ast.AST, pattern: Pattern) -> Iterator[Place]:
        for node in self.nodes(scope):
            if pattern.kind == "expression":
                if isinstance(node, ast.expr) and dump(node) == pattern.dumps[0]:
                    yield Place(function, self.start(node), self.end(node), True)
            elif pattern.kind == "header":
                if (
                    node is not scope
                    and is_compound(node)
                    and self._has_header(node, pattern)
                ):
                    yield Place(function, self.start(node), self.header_end(node), False)
            elif node is scope or not isinstance(node, SCOPES):
                yield from self._find_statements(function, node, pattern)

    def _has_header(self, node: ast.AST, pattern: Pattern) -> bool:
        is_elif = self.text.startswith("elif", self.start(node))
        return (
            is_elif == (pattern.keyword == "elif")
            and dump(header(node)) == pattern.dumps[0]
        )

    def _find_statements(
        self, function: str, node: ast.AST, pattern: Pattern
    ) -> Iterator[Place]:
        count = len(pattern.dumps)
        for name in BODIES:
            body = getattr(node, name, None)
            if not isinstance(body, list):
                continue
            dumps = [dump(statement) for statement in body]
            for first in range(len(body) - count + 1):
                if tuple(dumps[first : first + count]) == pattern.dumps:
                    yield Place(
                        function,
                        self.start(body[first]),
                        self.end(body[first + count - 1]),
                        False,
                    )

    def replaced(self, place: Place, code: str) -> str:
        """Return the text with other code in a place."""
        code = textwrap.dedent(code).strip() or "pass"
        before = self.text[: place.start]
        line = before[before.rfind("\n") + 1 :]
        indentation = line[: len(line) - len(line.lstrip())]
        if place.is_expression and is_expression(code):
            code = f"({code})"
        else:
            code = code.replace("\n", f"\n{indentation}")
        return before + code + self.text[place.end :]

    def nearest(self, function: str, code: str) -> tuple[str, str, float]:
        """Return the statement that is most similar to `code`: its function, its text, and the
        similarity from 0 to 1.1."""
        best = ("", "", 0.0)
        for name, scope in self.scopes:
            for node in self.nodes(scope):
                if not isinstance(node, ast.stmt) or node is scope:
                    continue
                text = self.text[
                    self.start(node) : self.header_end(node)
                    if is_compound(node)
                    else self.end(node)
                ]
                matcher = SequenceMatcher(None, code, text)
                bonus = 0.1 if name == function else 0.0
                if matcher.quick_ratio() + bonus <= best[2]:
                    continue
                ratio = matcher.ratio() + bonus
                if ratio > best[2]:
                    best = (name, text, ratio)
        return best
