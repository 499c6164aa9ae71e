"""Draws docs/images/architecture.svg from the program's own graph: what a stack makes, and what waits for what.

    make architecture

The program runs under the tests' engine in memory (tests/infra/mocks.py), so the picture needs no account and cannot
differ from the code. A box is a component of __main__.py; an arrow says that something in the box at its head waits for
something in the box at its tail, and goes before it on destroy. Arrows that follow from others are left out.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "infra")]

from mocks import Recorded, load_stack, run_program  # noqa: E402

STACK = "us-east-1"  # the one with both autoscaling by Karpenter and a NAT gateway per zone
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
INK, AWS, KUBERNETES = "#1f2933", "#fdf3e1", "#e4edfb"
WIDTH, GAP, LINE = 3.3, 1.1, 0.2  # inches: a box, the space between columns, a line of text


def components(recorded: Recorded) -> dict[str, str]:
    """The component of __main__.py that each resource lies in, by URN; what lies in none is left out."""
    parents = {each.urn: each.parent for each in recorded}
    top: dict[str, str] = {}
    for each in recorded:
        urn = each.urn
        while parents.get(parents[urn]) is not None:
            urn = parents[urn]
        if urn.split("::")[2].startswith("llama-trainium:"):
            top[each.urn] = urn
    return top


def graph(recorded: Recorded) -> dict[str, set[str]]:
    """What each component waits for, by URN, without what follows from the rest."""
    top = components(recorded)
    waits: dict[str, set[str]] = {urn: set() for urn in top.values()}
    for each in recorded:
        if each.urn in top:
            behind = {top[urn] for urn in each.dependencies | {each.provider} if urn in top}
            waits[top[each.urn]] |= behind - {top[each.urn]}

    def reach(urn: str) -> set[str]:
        return waits[urn].union(*(reach(one) for one in waits[urn]))

    return {urn: {one for one in found if not any(one in reach(o) for o in found)} for urn, found in waits.items()}


def columns(waits: dict[str, set[str]]) -> dict[str, int]:
    """How many components stand one after the other before each."""
    depth: dict[str, int] = {}

    def of(urn: str) -> int:
        if urn not in depth:
            depth[urn] = 1 + max((of(one) for one in waits[urn]), default=-1)
        return depth[urn]

    for urn in waits:
        of(urn)
    return depth


def contents(recorded: Recorded, urn: str) -> tuple[str, list[str], bool]:
    """A box's title, its text, and whether what is in it lives in Kubernetes rather than in AWS."""
    top = components(recorded)
    inside = [e for e in recorded if e.custom and top.get(e.urn) == urn and "pulumi:providers:" not in e.type]
    kinds = Counter(each.type.rsplit(":", 1)[-1] for each in inside)
    text = ", ".join(kind if count == 1 else f"{kind}\u00a0×{count}" for kind, count in kinds.most_common())
    title = f"{urn.split('::')[2].rsplit(':', 1)[-1]}  ·  {urn.rsplit('::', 1)[-1]}"
    return title, textwrap.wrap(text, 46), sum(each.type.startswith("kubernetes:") for each in inside) * 2 > len(inside)


def draw(recorded: Recorded, path: Path) -> None:
    """Write the picture."""
    waits = graph(recorded)
    depth = columns(waits)
    boxes = {urn: contents(recorded, urn) for urn in waits}
    height = {urn: LINE * (len(text) + 2.2) for urn, (_, text, _) in boxes.items()}
    stacks = [[urn for urn in waits if depth[urn] == column] for column in range(max(depth.values()) + 1)]
    tall = max(sum(height[urn] + 0.35 for urn in stack) for stack in stacks)
    wide = len(stacks) * (WIDTH + GAP) - GAP

    mpl.rcParams.update({"svg.hashsalt": "architecture", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure = plt.figure(figsize=(wide + 0.4, tall + 0.4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.2, wide + 0.2), ylim=(-0.2, tall + 0.2))
    axes.axis("off")

    place: dict[str, tuple[float, float]] = {}  # left edge, middle
    for column, stack in enumerate(stacks):
        free = (tall - sum(height[urn] for urn in stack)) / (len(stack) + 1)
        y = tall
        for urn in stack:
            y -= free + height[urn]
            place[urn] = (column * (WIDTH + GAP), y + height[urn] / 2)
            title, text, kubernetes = boxes[urn]
            left, top = place[urn][0], y + height[urn]
            shape = FancyBboxPatch((left, y), WIDTH, height[urn], boxstyle="round,pad=0,rounding_size=0.08")
            shape.set(facecolor=KUBERNETES if kubernetes else AWS, edgecolor=INK, linewidth=0.8)
            axes.add_patch(shape)
            axes.text(left + 0.12, top - 0.24, title, fontsize=10, fontweight="bold", color=INK, va="center")
            for number, line in enumerate(text):
                axes.text(left + 0.12, top - 0.5 - LINE * number, line, fontsize=7.5, color=INK, va="center")
    for number, (colour, meaning) in enumerate(((AWS, "in AWS"), (KUBERNETES, "in the cluster"))):
        axes.text(0.1 + 1.2 * number, 0, meaning, fontsize=8, color=INK, backgroundcolor=colour)
    for urn, found in waits.items():
        for one in found:
            start, end = (place[one][0] + WIDTH, place[one][1]), place[urn]
            style = {"arrowstyle": "-|>", "color": INK, "lw": 0.9, "shrinkA": 0, "shrinkB": 1}
            axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=0)
    path.parent.mkdir(exist_ok=True)
    # No date in it: the same program draws the same file.
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    token = {"llama-trainium:huggingFaceToken": "none"}
    draw(run_program(load_stack(STACK), token, STACK), PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}")
