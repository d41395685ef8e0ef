#!/usr/bin/env python3
"""Tests site/prose.py: what it finds in a text, and what it leaves alone.

    python3 site/test_prose.py
"""

import unittest

import prose

STYLE = {
    "words in a sentence": 5,
    "characters in a line": 20,
    "rules": [{"pattern": "\\bagents?\\b", "say": "it is the daemon"}],
}


def found(text):
    return [(line, words) for line, words in prose.faults(text, STYLE)]


def lines(text):
    return [number for number, _ in prose.long_lines(text, 20)]


class Lines(unittest.TestCase):
    def test_a_line_may_have_as_many_characters_as_the_style_says(self):
        self.assertEqual(lines("a" * 20), [])
        self.assertEqual(lines("short\n" + "a" * 21), [2])

    def test_characters_count_and_not_bytes(self):
        self.assertEqual(lines("µ" * 20), [])

    def test_items_and_headings_count(self):
        self.assertEqual(lines("- " + "a" * 19 + "\n1. " + "a" * 18 + "\n# " + "a" * 19), [1, 2, 3])

    def test_tables_code_and_pictures_do_not_count(self):
        self.assertEqual(lines("| " + "a" * 30 + " |\n```\n" + "a" * 30 + "\n```\n![" + "a" * 30 + "](a.svg)"), [])

    def test_code_in_an_item_does_not_count_and_what_follows_does(self):
        self.assertEqual(lines("- item\n  ```sh\n  " + "a" * 30 + "\n  ```\n" + "a" * 21), [5])

    def test_the_address_of_a_link_does_not_count_and_its_text_does(self):
        self.assertEqual(lines("[a](" + "b" * 30 + ")"), [])
        self.assertEqual(lines("[" + "a" * 30 + "](b)"), [1])

    def test_a_comment_of_the_generator_does_not_count(self):
        self.assertEqual(lines("<!-- begin " + "a" * 30 + " -->"), [])


class Sentences(unittest.TestCase):
    def test_a_long_sentence_is_found_where_it_begins(self):
        self.assertEqual([line for line, _ in found("One two.\n\nOne two three\nfour five six.")], [3])

    def test_a_word_with_a_better_one_is_found(self):
        self.assertEqual(found("The agent runs."), [(1, "'agent': it is the daemon")])

    def test_code_is_not_looked_at(self):
        self.assertEqual(found("The `agent` runs."), [])


if __name__ == "__main__":
    unittest.main()
