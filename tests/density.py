"""How densely code is written: what makes a reader stop, per 1,000 lines of code.

    python tests/density.py             # the library
    python tests/density.py litft/data  # one folder, with its densest functions

A line of code is a line with a token that belongs to no comment and no docstring. Names of
variables are counted as nodes of the syntax tree; constants and contexts are not.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
SHORT_FUNCTION = 10  # lines of code below which a function cannot be dense


@dataclass(frozen=True)
class Function:
    """One function of at least ten lines of code."""

    place: str
    nodes_per_line: float
    local_names: int


@dataclass
class Density:
    """Counts over several files."""

    lines: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    nodes: int = 0
    long_lines: int = 0
    parallel_assignments: int = 0
    comprehensions: int = 0
    nested_comprehensions: int = 0
    conditional_expressions: int = 0
    walruses: int = 0
    functions: list[Function] = field(default_factory=list)

    def per_1000(self, count: int) -> float:
        """Return a count per 1,000 lines of code."""
        return 1000 * count / max(1, self.code_lines)

    def figures(self) -> dict[str, float]:
        """Return the figures that tests/test_house.py limits."""
        return {
            "nodes a line": self.nodes / max(1, self.code_lines),
            "lines over 100 characters": self.per_1000(self.long_lines),
            "parallel assignments": self.per_1000(self.parallel_assignments),
            "comprehensions": self.per_1000(self.comprehensions),
            "nested comprehensions": self.per_1000(self.nested_comprehensions),
            "conditional expressions": self.per_1000(self.conditional_expressions),
            "walruses": self.per_1000(self.walruses),
        }


def measure(paths: list[Path]) -> Density:
    """Return the counts of Python files."""
    total = Density()
    for path in paths:
        _add(total, path)
    return total


def _add(total: Density, path: Path) -> None:
    text = path.read_text("utf-8")
    rows = text.splitlines()
    tree = ast.parse(text)
    code = _code_lines(text, tree)
    total.lines += len(rows)
    total.code_lines += len(code)
    total.comment_lines += sum(row.strip().startswith("#") for row in rows)
    total.long_lines += sum(len(rows[number - 1]) > 100 for number in code)
    total.nodes += _num_nodes(tree)
    for node in ast.walk(tree):
        total.parallel_assignments += _is_parallel(node)
        total.conditional_expressions += isinstance(node, ast.IfExp)
        total.walruses += isinstance(node, ast.NamedExpr)
        if isinstance(node, COMPREHENSIONS):
            total.comprehensions += 1
            total.nested_comprehensions += _is_nested(node)
        if isinstance(node, FUNCTIONS):
            size = sum(node.lineno <= number <= node.end_lineno for number in code)
            if size >= SHORT_FUNCTION:
                place = f"{path}:{node.lineno} {node.name}"
                density = _num_nodes(node) / size
                total.functions.append(Function(place, density, len(_local_names(node))))


def _code_lines(text: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if _is_docstring(node):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def _is_docstring(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _num_nodes(tree: ast.AST) -> int:
    uncounted = (ast.expr_context, ast.Constant)
    return sum(not isinstance(node, uncounted) for node in ast.walk(tree))


def _is_parallel(node: ast.AST) -> bool:
    """Return whether an assignment gives several names several values; a swap does not count."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    return {ast.unparse(item) for item in target.elts} != {
        ast.unparse(item) for item in node.value.elts
    }


def _is_nested(comprehension: ast.AST) -> bool:
    """Return whether a comprehension has several loops, or another one inside."""
    inner = [node for node in ast.walk(comprehension) if isinstance(node, COMPREHENSIONS)]
    return len(inner) > 1 or len(comprehension.generators) > 1


def _local_names(function: ast.AST) -> set[str]:
    """Return the names that a function binds, without its arguments."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _report(density: Density) -> Iterator[str]:
    yield f"{density.lines:,} lines, {density.code_lines:,} of code, {density.nodes:,} nodes"
    for name, value in density.figures().items():
        yield f"{value:6.1f}  {name}"
    share = 100 * density.comment_lines / max(1, density.lines)
    yield f"{share:6.1f}  comments of their own line, % of all lines"
    for function in sorted(density.functions, key=lambda f: f.nodes_per_line, reverse=True)[
        :15
    ]:
        names = f"{function.local_names} local names"
        yield f"{function.nodes_per_line:6.1f} nodes a line, {names}: {function.place}"


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "litft")
    print("\n".join(_report(measure(sorted(folder.rglob("*.py"))))))
