"""A source file as a syntax tree whose anchors have line numbers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from megatron_flex_patches.errors import PatchError
from megatron_flex_patches.lines import BOM, Insertion, split

Node = TypeVar("Node", bound=cst.CSTNode)
FUTURE = "__future__"


class Tree:
    """A parsed file.

    Args:
        content: the file.

    Raises:
        PatchError: it is not valid Python.
    """

    def __init__(self, content: bytes) -> None:
        self.lines = split(content.removeprefix(BOM))
        try:
            wrapper = MetadataWrapper(cst.parse_module(content.removeprefix(BOM)), unsafe_skip_copy=True)
        except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
            raise PatchError(f"is not valid Python: {str(error).splitlines()[0]}") from error
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)

    # -- locations ------------------------------------------------------------------------------

    def first_line(self, node: cst.CSTNode) -> int:
        """The number of the first line, from 1; for a definition, that of its decorators."""
        decorators = getattr(node, "decorators", ())
        return min(self._positions[n].start.line for n in (node, *decorators))

    def last_line(self, node: cst.CSTNode) -> int:
        """The number of the last line."""
        return int(self._positions[node].end.line)

    def before(self, node: cst.CSTNode, *text: str) -> Insertion:
        """Lines before a statement."""
        line = self.first_line(node)
        return Insertion(line, self._indent(line), text)

    def behind(self, node: cst.CSTNode, *text: str) -> Insertion:
        """Lines after a statement."""
        return Insertion(self.last_line(node) + 1, self._indent(self.first_line(node)), text)

    def _indent(self, line: int) -> bytes:
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip(b" \t\f"))]

    # -- nodes ---------------------------------------------------------------------------------

    def all(self, kind: type[Node], within: cst.CSTNode | None = None) -> Iterator[Node]:
        """All nodes of a kind, in the order of the file."""
        return (n for n in _walk(within or self.module) if isinstance(n, kind))

    def class_of(self, name: str) -> cst.ClassDef:
        """The class of a name.

        Raises:
            PatchError: there is none, or there are several.
        """
        return self._only(f"class {name}", [c for c in self.all(cst.ClassDef) if c.name.value == name])

    def method(self, owner: cst.ClassDef, name: str) -> cst.FunctionDef:
        """A method of a class.

        Raises:
            PatchError: there is none, or there are several.
        """
        found = [n for n in owner.body.body if isinstance(n, cst.FunctionDef) and n.name.value == name]
        return self._only(f"method {owner.name.value}.{name}", found)

    def _only(self, what: str, found: list[Node]) -> Node:
        if len(found) != 1:
            raise PatchError(f"has {len(found) or 'no'} {what}, and the patch needs one")
        return found[0]

    def statement(self, node: cst.CSTNode, what: str) -> cst.SimpleStatementLine:
        """The statement that contains a node, on lines of its own.

        Args:
            node: the node.
            what: the name of the anchor in errors.

        Raises:
            PatchError: it shares its line with others.
        """
        at: cst.CSTNode = node
        while not isinstance(
            at, cst.SimpleStatementLine | cst.SimpleStatementSuite | cst.BaseCompoundStatement
        ):
            at = self._parents[at]
        if not isinstance(at, cst.SimpleStatementLine) or len(at.body) != 1:
            code = self.module.code_for_node(at).strip()
            raise PatchError(
                f"has {what} on a line with other statements, `{code:.80}`; give it a line of its own"
            )
        return at

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The ancestors of a node, from the inside out."""
        while node is not self.module:
            node = self._parents[node]
            yield node

    def binds(self, name: str) -> bool:
        """Whether the file imports a name at the top level."""
        return any(
            isinstance(alias, cst.ImportAlias) and (alias.evaluated_alias or alias.evaluated_name) == name
            for node in self.all(cst.ImportFrom)
            if not isinstance(node.names, cst.ImportStar)
            for alias in node.names
        )

    def first_import(self) -> cst.BaseStatement | cst.SimpleStatementLine:
        """The statement before which new imports are inserted: the first after docstring and future imports.

        Raises:
            PatchError: there is none.
        """
        for number, one in enumerate(self.module.body):
            if not isinstance(one, cst.SimpleStatementLine):
                return one
            first = one.body[0]
            text = number == 0 and isinstance(first, cst.Expr) and not isinstance(first.value, cst.Call)
            if text or (isinstance(first, cst.ImportFrom) and code_of(first.module) == FUTURE):
                continue
            return self.statement(first, "its first import")
        raise PatchError("holds nothing that could be patched")


@dataclass(frozen=True)
class Call:
    """A call in a method, and its statement.

    Attributes:
        node: the call.
        statement: the statement.
        what: its name in errors.
    """

    node: cst.Call
    statement: cst.SimpleStatementLine
    what: str

    @property
    def target(self) -> str:
        """The one name that the call's result is assigned to.

        Raises:
            PatchError: it is not.
        """
        done = self.statement.body[0]
        if isinstance(done, cst.Assign) and done.value is self.node and len(done.targets) == 1:
            target = done.targets[0].target
            if isinstance(target, cst.Name):
                return target.value
        raise PatchError(f"does not assign {self.what} to one name")

    def name(self, keyword: str) -> str:
        """The name that is passed for a keyword; for an empty one the first positional one.

        Raises:
            PatchError: it is something else.
        """
        value = self.value(keyword)
        if not isinstance(value, cst.Name):
            raise PatchError(f"does not give {self.what} a plain name for {keyword or 'its first argument'}")
        return value.value

    def value(self, keyword: str) -> cst.BaseExpression:
        """The expression that is passed for a keyword; for an empty one the first positional one.

        Raises:
            PatchError: nothing is.
        """
        for argument in self.node.args:
            if argument.star == "" and (argument.keyword.value if argument.keyword else "") == keyword:
                return argument.value
        raise PatchError(f"gives {self.what} no {keyword or 'first argument'}")

    def rest(self) -> str:
        """The further arguments as source: with a comma before each."""
        said = []
        for argument in self.node.args[1:]:
            keyword = f"{argument.keyword.value}=" if argument.keyword else argument.star
            said.append(f", {keyword}{in_a_line(argument.value)}")
        return "".join(said)


def calls(tree: Tree, method: cst.FunctionDef, where: str, *functions: str) -> list[Call]:
    """The calls of some functions in a method, as `self.name` or `name`, in order.

    Raises:
        PatchError: there is none.
    """
    found = []
    for node in tree.all(cst.Call, method):
        name = code_of(node.func)
        if name in functions:
            what = f"the call of {name} in {where}"
            found.append(Call(node, tree.statement(node, what), what))
    if not found:
        raise PatchError(f"has no call of {' or '.join(functions)} in {where}")
    return found


def code_of(node: cst.CSTNode | None) -> str:
    """A node as source code."""
    return "" if node is None else cst.Module([]).code_for_node(node).strip()


def in_a_line(node: cst.CSTNode) -> str:
    """An expression without line ends and comments."""
    return ast.unparse(ast.parse(f"(\n{code_of(node)}\n)", mode="eval"))


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in node.children:
        yield child
        yield from _walk(child)
