"""Gathers the pages of the site: those of docs/, and a page for each file of the repository that a page names.

A link from a page of docs/ to a file outside, such as ../crates/migration/src/message.rs, leads on the forges to that file.
The site has it as source/crates/migration/src/message.rs.html: Markdown as it is, other files as listings, directories as
lists. These pages are not searched.

    python3 site/stage.py DIRECTORY
"""

import os
import re
import shutil
import sys
from urllib.parse import unquote

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The text of a link may have brackets in code; its address has no spaces.
LINK = re.compile(r"(!?\[(?:[^\[\]]|`[^`]*`)*\]\()([^)\s]+)(\))")
LANGUAGES = {".rs": "rust", ".c": "c", ".h": "c", ".cpp": "cpp", ".json": "json", ".proto": "protobuf", ".patch": "diff"}
PICTURES = (".svg", ".png")


def is_elsewhere(address):
    return re.match(r"[a-z]+:|#", address)


def in_site(path):
    """The page of the site for a path in the repository."""
    if path == "docs":
        return "README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if os.path.isdir(os.path.join(ROOT, path)):
        return f"source/{path}/index.md"
    return f"source/{path}" if path.endswith((".md", *PICTURES)) else f"source/{path}.md"


def targets(text, path):
    """What the Markdown of a file names: the match, the path in the repository and the anchor."""
    for match in LINK.finditer(text):
        address, _, anchor = match[2].partition("#")
        if not is_elsewhere(match[2]):
            yield match, os.path.normpath(os.path.join(os.path.dirname(path), unquote(address))), anchor


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def content(path):
    """The Markdown of a page for a file or directory outside docs/."""
    if path.startswith("docs/"):
        return read(path)
    hidden = "---\nsearch:\n  exclude: true\n---\n"
    if path.endswith(".md"):
        return hidden + read(path)
    title = f"{hidden}# `{path}`\n\n"
    if os.path.isdir(os.path.join(ROOT, path)):
        names = sorted(name for name in os.listdir(os.path.join(ROOT, path)) if not name.startswith("."))
        return title + "".join(f"- `{name}`\n" for name in names)
    return f"{title}``````{LANGUAGES.get(os.path.splitext(path)[1], 'text')}\n{read(path)}\n``````\n"


def with_addresses_of_site(text, path):
    """The Markdown with links that hold in the site."""
    begin = os.path.dirname(in_site(path)) or "."
    parts, at = [], 0
    for match, target, anchor in targets(text, path):
        parts += [text[at : match.start(2)], os.path.relpath(in_site(target), begin) + (f"#{anchor}" if anchor else "")]
        at = match.end(2)
    return "".join(parts) + text[at:]


def with_lists_of_python(text):
    """The Markdown with lists as Python-Markdown wants them: an empty line before a list, and before a block in an item;
    what belongs to an item indented by four."""
    lines, offset, is_code, is_inside, has_blocks = [], 0, False, False, False
    for line in text.split("\n"):
        item = None if is_code else re.match(r"(?:[-*]|\d+\.) +", line)
        if item:
            if (has_blocks or not offset) and lines and lines[-1].strip():
                lines.append("")
            offset, has_blocks = len(item[0]), False
        elif line.strip() and not line.startswith(" ") and (not is_code or not is_inside):
            # A paragraph may go on at the left edge, unless it is a new one.
            if not lines or not lines[-1].strip() or line.startswith(("#", "```", "|")):
                offset = 0
        elif offset and line.startswith(" " * offset):
            line = " " * 4 + line[offset:]
        fence = re.match(r"\s*```", line)
        begins_block = (fence and not is_code) or (re.match(r"    (\||[-*] )", line) and not re.match(r"    (\||[-*] |  )", lines[-1]))
        if offset and begins_block and line.startswith(" "):
            has_blocks = True
            if lines[-1].strip():
                lines.append("")
        if fence:
            is_code = not is_code
            is_inside = is_code and line.startswith(" ")
        lines.append(line)
    return "\n".join(lines)


def main():
    place = sys.argv[1]
    shutil.rmtree(place, ignore_errors=True)
    wanted = ["CHANGELOG.md", "CONTRIBUTING.md"]
    for directory, _, names in os.walk(os.path.join(ROOT, "docs")):
        wanted += [os.path.relpath(os.path.join(directory, name), ROOT) for name in names]
    made = set()
    while wanted:
        path = wanted.pop()
        # What does not exist is left to the check of the links in the site.
        if path in made or path == "docs" or not os.path.exists(os.path.join(ROOT, path)):
            continue
        made.add(path)
        page = os.path.join(place, in_site(path))
        os.makedirs(os.path.dirname(page), exist_ok=True)
        if path.endswith(PICTURES):
            shutil.copy(os.path.join(ROOT, path), page)
            continue
        text = content(path)
        if path.endswith(".md"):
            wanted += [target for _, target, _ in targets(text, path)]
            text = with_lists_of_python(with_addresses_of_site(text, path))
        with open(page, "w", encoding="utf-8") as file:
            file.write(text)


main()
