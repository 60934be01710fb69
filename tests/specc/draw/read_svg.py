"""Reading a picture back: groups by id, their texts and their marks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"


class Svg:
    """Content of an SVG file."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.parse(path).getroot()
        assert self.root.tag == f"{SVG}svg"
        self.groups = {g.get("id"): g for g in self.root.iter(f"{SVG}g") if g.get("id")}
        self.size = tuple(float(x) for x in self.root.get("viewBox").split()[2:])

    def texts(self, prefix: str) -> dict[str, str]:
        """Text of each group whose id begins so, without the prefix."""
        return {
            name.removeprefix(prefix): "".join(group.itertext()).strip()
            for name, group in self.groups.items()
            if name.startswith(prefix)
        }

    def marks(self, name: str) -> list[tuple[float, float]]:
        """Places of a group's repeated marks, points from the upper left."""
        group = self.groups.get(name)
        uses = [] if group is None else group.iter(f"{SVG}use")
        return [(float(use.get("x")), float(use.get("y"))) for use in uses]

    def paths(self, name: str) -> list[str]:
        group = self.groups.get(name)
        found = [] if group is None else group.findall(f"{SVG}path")
        return [path.get("d") for path in found]

    def place(self, name: str) -> tuple[float, float]:
        """Of a group's text."""
        text = next(self.groups[name].iter(f"{SVG}text"))
        return float(text.get("x")), float(text.get("y"))
