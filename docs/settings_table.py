"""Writes the table of all settings into README.md, from the classes of `training.config`: `make docs`."""

from __future__ import annotations

import inspect
from pathlib import Path

from training.config import Settings, setting_fields
from training.options import default_text, metavar

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- settings: written by `make docs` -->\n", "<!-- end of settings -->"


def table() -> str:
    """One Markdown table per section, each under what the section is for."""
    lines = []
    for section, group in Settings.model_fields.items():
        lines += [f"**`{section}`** - {inspect.getdoc(group.annotation)}", "", "| key | value | default | |"]
        lines.append("|---|---|---|---|")
        for name, field in setting_fields().items():
            if name.startswith(f"{section}."):
                meaning, _, derived = (field.description or "").partition(" [default: ")
                default = derived.rstrip("]") or default_text(field)
                cells = (f"`{name}`", f"`{metavar(field.annotation)}`", default, meaning)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    README.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")
