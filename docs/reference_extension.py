"""What the API reference has to know of the source: how collectives are made, and docstrings.

    @collective        the function returns `Request[T]`; its caller gets `T`
    asynchronous(f)    takes the arguments of `f`, and returns a `PendingCollective[T]`
    PendingCollective  is another name of a class

In a docstring a block of aligned lines says what the arguments are,

    tensor      of the same shape on every rank; not changed
    into        where to put the result; else a new tensor

and becomes a list. All else in a docstring is Markdown already.

The example that stands below a name on its page,

    ::: phalanx.DDP

    ```python

is shown with the docstring, above its first heading: below the name it would come after all
methods. So this file is also a hook of mkdocs, which takes the example from the page. The last
line of a docstring here is the file that has it.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from typing import Any

from griffe import Alias, Attribute, Docstring, ExprName, Extension, Function, Module, Object

ARGUMENT = re.compile(r"(?P<name>[`\w*][^\s]*(?:(?:, | )[`\w*][^\s,]*)*?) {2,}(?P<text>\S.*)")
LONG_NAME = re.compile(r"(?P<name>\w+) (?P<text>\S.*)")  # one that leaves a single space
END_OF_LIST = "<!-- -->"
ISSUED = re.compile(r"asynchronous\((\w+)\)")
REQUEST = re.compile(r"Request\[(.*)\]")
PAGES = sorted((Path(__file__).parent / "reference").glob("*.md"))
SHOWN = re.compile(r"^::: phalanx\.([\w.]+)$", re.MULTILINE)
ENTRY = re.compile(  # a name, its options, and its example
    r"(^::: phalanx\.([\w.]+)\n(?:    .*\n)*)\n(```python\n(?:.*\n)*?```\n)", re.MULTILINE
)
NUMBER = re.compile(r"[\d.]+( (<<|\*) [\d.]+)*")
HEADING = re.compile(r"^#+ ", re.MULTILINE)


def returned(function: Function) -> str:
    """What the caller of a function that returns `Request[T]` gets: T."""
    return REQUEST.sub(r"\1", str(function.returns))


def is_collective(function: Function) -> bool:
    """Whether it is written as what it asks for."""
    return any(str(decorator.value) == "collective" for decorator in function.decorators)


def issued(name: str, attribute: Attribute, blocking: Function) -> Function:
    """The form of a collective that returns at once."""
    form = Function(
        name,
        lineno=attribute.lineno,
        endlineno=attribute.endlineno,
        parameters=blocking.parameters,
        returns=f"PendingCollective[{returned(blocking)}]",
    )
    text = (
        f"`{blocking.name}` that returns at once; `wait()` of what it returns gives the result. "
        f"The arguments are those of [`{blocking.name}`][phalanx.{blocking.name}]."
    )
    form.docstring = Docstring(text, parent=form)
    return form


def as_markdown(text: str) -> str:
    """A docstring whose blocks of aligned arguments are lists."""
    paragraphs = [as_list(paragraph) for paragraph in text.split("\n\n")]
    for place, (before, after) in enumerate(pairwise(paragraphs), 1):
        if before.startswith("- ") and after.startswith("    "):
            paragraphs[place] = f"{END_OF_LIST}\n\n{after}"  # or the code would be part of the list
    return "\n\n".join(paragraphs)


def as_list(paragraph: str) -> str:
    """A list, if it is a block of arguments; fixed width, if it is a table; else as it is."""
    lines = paragraph.splitlines()
    entries = [ARGUMENT.fullmatch(line) for line in lines]
    columns = [entry["text"] for entry in entries if entry is not None]
    if len(columns) > 1 and all(re.search(r"\S {2,}\S", text) for text in columns):
        return indent(paragraph, "    ")  # a table of three columns
    if entries[0] is None:
        return paragraph
    column, items = entries[0].start("text"), list[str]()
    for line, aligned in zip(lines, entries, strict=True):
        long = LONG_NAME.fullmatch(line)
        entry = aligned or (long if long and long.start("text") == column else None)
        if entry is not None:
            names = ", ".join(f"`{name.strip('`')}`" for name in entry["name"].split(", "))
            items.append(f"- {names}: {entry['text']}")
        else:
            items[-1] += f" {line.strip()}"
    return "\n".join(items)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return a page of the reference without the examples, which docstrings have."""
    return ENTRY.sub(r"\1", markdown)


def definition(name: Object | Alias) -> str:
    """The path of what a name is defined as; that of the class, if it is another name of one."""
    target = name.final_target if isinstance(name, Alias) else name
    if target.name == "PendingCollective":
        target = target.module[str(target.value)].final_target
    return str(target.path)


def without_lists(text: str) -> str:
    """The paragraphs of a docstring that are no list."""
    return "\n\n".join(part for part in text.split("\n\n") if not part.startswith("- "))


def with_example(text: str, example: str, source: str) -> str:
    """A docstring with an example above its first heading, and its file in the end."""
    heading = HEADING.search(text)
    place = heading.start() if heading else len(text)
    parts = [text[:place].rstrip(), example, text[place:].rstrip(), f"Source: `{source}`"]
    return "\n\n".join(part for part in parts if part)


class ReferenceExtension(Extension):
    """Changes what griffe has read before it is shown."""

    def __init__(self) -> None:
        """Read the names that the pages show, and their examples."""
        super().__init__()
        text = "\n".join(page.read_text() for page in PAGES)
        self.shown = SHOWN.findall(text)
        self.examples = {name: example for _, name, example in ENTRY.findall(text)}
        self.named: dict[str, str] = {}  # by the path of the definition

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        """Find out where the names of the reference are defined."""
        if pkg.path == "phalanx":
            self.package = pkg
            for name in self.shown:
                if pkg[name].is_module:  # which has the function of the same name
                    path = f"{pkg[name].canonical_path}.{name.rpartition('.')[2]}"
                    pkg.set_member(name, Alias(name, path, parent=pkg))
            self.named = {definition(pkg[name]): name for name in self.shown}

    def on_module(self, *, mod: Module, **kwargs: Any) -> None:
        """Asynchronous forms of collectives are functions, and `PendingCollective` is a class."""
        if not mod.path.startswith("phalanx"):
            return
        for name, member in list(mod.members.items()):
            if isinstance(member, Attribute) and str(member.value).startswith("asynchronous("):
                blocking = mod.members[ISSUED.fullmatch(str(member.value))[1]]
                mod.set_member(name, issued(name, member, blocking))
            elif isinstance(member, Attribute) and name == "PendingCollective":
                where = mod.members[str(member.value)].target_path
                mod.set_member(name, Alias(name, where, parent=mod))
        for member in mod.members.values():
            if isinstance(member, Function) and is_collective(member):
                member.returns = returned(member)

    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        """Show a default that is a number with a name inside of the package as the number."""
        for parameter in func.parameters:
            if isinstance(parameter.default, ExprName) and func.path.startswith("phalanx"):
                value = self.value_of(parameter.default.canonical_path)
                if NUMBER.fullmatch(value):
                    parameter.default = value

    def value_of(self, path: str) -> str:
        """Return a constant as it is written; "" for what the reference shows by its name."""
        name = path.removeprefix("phalanx.")
        if name == path or name.rpartition(".")[2] in self.shown:
            return ""
        constant = self.package[name]
        return str(constant.value) if isinstance(constant, Attribute) else ""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Docstrings are Markdown."""
        if obj.docstring is None:
            return
        obj.docstring.value = as_markdown(obj.docstring.value)
        if self.named.get(obj.path) == "PendingCollective":  # its attributes are for Phalanx alone
            obj.docstring.value = without_lists(obj.docstring.value)
        if (name := self.named.get(obj.path)) is not None:
            example = self.examples.get(name, "")
            source = str(obj.relative_package_filepath)
            obj.docstring.value = with_example(obj.docstring.value, example, source)
