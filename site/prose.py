#!/usr/bin/env python3
"""Checks the documentation against site/style.json: words with a better one in docs/glossary.md, long sentences,
sentences whose subject is a clause, and long lines.

    python3 site/prose.py [FILE…]

It skips code, addresses of links and pictures. A cell of a table is a sentence. site/test_prose.py tests it.
"""

import json
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def sentences(text):
    """Each sentence of a Markdown text, with the number of the line in which it begins."""
    text = re.sub(r"^( *)(```+|~~~).*?^ *\2.*?$|<!--.*?-->", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    # A word in place of code, so that a sentence keeps its length.
    text = re.sub(r"``.+?``|`[^`]*`", lambda code: "CODE" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", text)
    block, begin = [], 0

    def cut(block, begin):
        whole = "\n".join(block)

        def line(at):
            return begin + whole.count("\n", 0, at + len(whole[at:]) - len(whole[at:].lstrip()))

        # Ends at a stop before a capital or code, not at "e.g." or "et al.".
        at = 0
        for end in re.finditer(r"(?<!e\.g)(?<!i\.e)(?<!al)[.!?:;][)\"*_]*(?=\s+(?:[(\"]*[A-Z`]|[*_]+\w)|\s*$)|;(?=\s)", whole):
            yield line(at), whole[at : end.end()]
            at = end.end()
        if whole[at:].strip():
            yield line(at), whole[at:]

    for number, line in enumerate([*text.split("\n"), ""], 1):
        stripped = line.strip()
        if stripped.startswith("|"):
            yield from cut(block, begin)
            block = []
            for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                yield from cut([cell], number)
        elif not stripped or re.match(r"(#+|[-*]|\d+\.) ", stripped):
            yield from cut(block, begin)
            if stripped.startswith("#"):
                yield from cut([stripped.lstrip("# ")], number)
            block, begin = [re.sub(r"^([-*]|\d+\.) |^#.*", "", stripped)], number
        else:
            if not block:
                begin = number
            block.append(stripped)


def long_lines(text, most):
    """Each line of prose with more than this many characters, and how many it has. Tables and blocks of code have lines of
    any length, and the address of a link does not count."""
    text = re.sub(r"^( *)(```+|~~~).*?^ *\2.*?$|<!--.*?-->", lambda code: "\n" * code[0].count("\n"), text, flags=re.S | re.M)
    for number, line in enumerate(text.split("\n"), 1):
        length = len(re.sub(r"\]\([^)]*\)", "]", line.rstrip()))
        if length > most and not re.match(r"\s*(\||!\[|\[[^\]]+\]:)", line):
            yield number, length


def faults(text, style):
    for line, length in long_lines(text, style["characters in a line"]):
        yield line, f"a line of {length} characters; {style['characters in a line']} are the most"
    for line, sentence in sentences(text):
        words = re.findall(r"[^\s]*\w[^\s]*", sentence)
        if len(words) > style["words in a sentence"]:
            yield line, f"a sentence of {len(words)} words; {style['words in a sentence']} are the most: {' '.join(words[:8])} …"
        plain = " ".join(sentence.split()).lstrip("*_(\" ")
        for rule in style["rules"]:
            found = re.search(rule["pattern"], plain, 0 if rule.get("case") else re.I)
            if found:
                yield line, f"'{found[0]}': {rule['say']}"


def main():
    with open(os.path.join(ROOT, "site", "style.json"), encoding="utf-8") as file:
        style = json.load(file)
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    files = sys.argv[1:] or [path for path in listed.stdout.split("\n") if path and path not in style["not these"]]
    wrong = 0
    for path in files:
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            for line, words in faults(file.read(), style):
                print(f"{path}:{line}: {words}", file=sys.stderr)
                wrong += 1
    if wrong:
        sys.exit(f"Error: {wrong} places do not follow site/style.json")


if __name__ == "__main__":
    main()
