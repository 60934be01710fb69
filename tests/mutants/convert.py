"""Mutants in the format before (`[[mutant]]`) as one line each; deleted after the last merge.

    python -P tests/mutants/convert.py FILE.toml …     rewrite files of either format
    python -P tests/mutants/convert.py --merge         resolve conflicts of `git merge` in this
                                                       folder, mutant by mutant, and add the files

A mutant that both sides changed in different ways is printed, ours is taken, and the file is not
added.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

KEYS = ("breaks", "find", "replace", "tests", "ends", "limit_s")


def read(text):
    """(head comment, name → entry); an entry has `file`, and `comment` of lines above it."""
    head, comments = _comments(text)
    data = tomllib.loads(text)
    if "mutant" in data:
        entries = {entry.pop("name"): entry for entry in data["mutant"]}
    else:
        entries = {
            name: {"file": file, **entry}
            for file, table in data.items()
            for name, entry in table.items()
        }
    for name, comment in comments.items():
        entries[name]["comment"] = comment
    return head, entries


def _comments(text):
    """Comment at the top, and that of each mutant which has one."""
    lines, head = text.splitlines(), []
    while lines and lines[0].startswith("#"):
        head.append(lines.pop(0))
    found, waiting, inside = {}, [], None
    for line in lines:
        if inside:
            inside = None if inside in line else inside
            continue
        if line.startswith("#"):
            waiting.append(line)
        if waiting and (name := re.match(r"name = ['\"](.*)['\"]$|\"?([\w.-]+)\"? = \{", line)):
            found[name[1] or name[2]], waiting = waiting, []
        opened = re.search(r"= ('''|\"\"\")", line)
        if opened and line.count(opened[1]) == 1:
            inside = opened[1]
    assert not waiting, waiting
    return head, found


def string(text):
    if "'" not in text and text.isprintable():
        return f"'{text}'" if '"' in text or "\\" in text else f'"{text}"'
    # of JSON's escapes TOML has all but \/ and surrogates
    return json.dumps(text, ensure_ascii=False)


def value(x):
    if isinstance(x, list):
        return "[" + ", ".join(map(string, x)) + "]"
    return string(x) if isinstance(x, str) else str(x)


def write(head, entries):
    files = {}
    for name, entry in entries.items():
        files.setdefault(entry["file"], []).append((name, entry))
    lines = [*head]
    for file, those in files.items():
        lines += [""] if lines else []
        lines.append(f'["{file}"]')
        for name, entry in those:
            lines += entry.get("comment", [])
            parts = ", ".join(f"{key} = {value(entry[key])}" for key in KEYS if key in entry)
            key = name if re.fullmatch(r"[\w-]+", name) else f'"{name}"'
            lines.append(f"{key} = {{{parts}}}")
    text = "\n".join(lines) + "\n"
    bare = lambda x: {n: {k: v for k, v in e.items() if k != "comment"} for n, e in x.items()}  # noqa: E731
    assert bare(read(text)[1]) == bare(entries)
    return text


def merged(base, ours, theirs):
    """Entries of both sides; names of those that each changed in another way."""
    found, conflicts = {}, []
    for name in dict.fromkeys([*theirs, *ours]):
        b, o, t = base.get(name), ours.get(name), theirs.get(name)
        if o != t and o != b and t != b:
            conflicts.append(name)
        chosen = t if o == b else o
        if chosen is not None:
            found[name] = chosen
    return found, conflicts


def merge():
    def git(*words):
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout

    folder = "tests/mutants"
    status = git("ls-files", "-u", "--full-name", folder).splitlines()
    stages = {}
    for line in status:
        meta, path = line.split("\t")
        if path.endswith(".toml"):
            _, blob, stage = meta.split()
            stages.setdefault(path, {})[stage] = git("cat-file", "-p", blob)
    for path, texts in stages.items():
        if "<<<<<<<" in texts.get("1", ""):
            # of several bases: that before everything
            show = ["git", "show", f"bac75e9c:{path}"]
            texts["1"] = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        sides = [read(texts.get(stage, "")) for stage in "123"]
        entries, conflicts = merged(*(side[1] for side in sides))
        if not entries:
            git("rm", "-q", path)
            continue
        Path(path).write_text(write(sides[1][0] or sides[2][0], entries), encoding="utf-8")
        if conflicts:
            print(f"{path}: both changed: {', '.join(conflicts)}")
        else:
            git("add", path)
            print(f"{path}: resolved")


if __name__ == "__main__":
    if sys.argv[1:] == ["--merge"]:
        merge()
    for name in sys.argv[1:]:
        if name.endswith(".toml"):
            path = Path(name)
            path.write_text(write(*read(path.read_text(encoding="utf-8"))), encoding="utf-8")
