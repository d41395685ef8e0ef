#!/usr/bin/env python3
"""Checks the links of the repository's Markdown: files exist, and anchors are headings. Names of documents in sources and
scripts, such as docs/memory.md, are checked, too.

    python3 site/links.py
"""

import os
import re
import subprocess
import sys
from urllib.parse import unquote

LINK = re.compile(r"\[(?:[^\[\]]|`[^`]*`|\[[^\]]*\])*\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"^\[[^\]]+\]: (\S+)", re.M)
# A document of docs/ that a comment, a message or a script names.
NAMED = re.compile(r"(?<![\w/.])((?:docs|isa)/[\w./-]+\.(?:md|svg))")
SOURCES = re.compile(r"(\.(rs|c|h|cpp|py|toml|service|md)|Makefile|\.ci/run)$|^scripts/|^packaging/")


def without_code(text):
    text = re.sub(r"^( *)(```+|~~~).*?^ *\2", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    return re.sub(r"``.+?``|`[^`]*`", lambda code: "`" + "\n" * code[0].count("\n") + "`", text)


def anchors(text):
    """Those that the forges make of headings."""
    found, seen = set(), {}
    text = re.sub(r"^( *)(```+|~~~).*?^ *\2", "", text, flags=re.S | re.M)
    for heading in re.findall(r"^#+ +(.*?)\s*$", text, flags=re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        number = seen[anchor] = seen.get(anchor, -1) + 1
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def main():
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"], stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")
    files = [path for path in listed if SOURCES.search(path) and os.path.isfile(path)]
    texts = {path: open(path, encoding="utf-8", errors="replace").read() for path in files}
    headings = {path: anchors(text) for path, text in texts.items() if path.endswith(".md")}
    wrong = []
    for path, text in texts.items():
        if path.endswith(".md"):
            text = without_code(text)
            for match in [*LINK.finditer(text), *REFERENCE.finditer(text)]:
                address = match[1].strip("<>")
                if re.match(r"[a-z]+:", address):
                    continue
                line = text.count("\n", 0, match.start()) + 1
                file, _, anchor = address.partition("#")
                target = os.path.normpath(os.path.join(os.path.dirname(path), unquote(file))) if file else path
                if os.path.isdir(target) and anchor:
                    target = os.path.join(target, "README.md")
                if not os.path.exists(target):
                    wrong.append(f"{path}:{line}: there is no {target}")
                elif anchor and anchor not in headings.get(target, ()):
                    wrong.append(f"{path}:{line}: {target} has no heading #{anchor}")
        else:
            for match in NAMED.finditer(text):
                if not os.path.exists(match[1]):
                    wrong.append(f"{path}:{text.count(chr(10), 0, match.start()) + 1}: there is no {match[1]}")
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        sys.exit(f"Error: {len(wrong)} links lead nowhere")


main()
