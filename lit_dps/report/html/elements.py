"""Elements of the report page. Each text is escaped, since users choose names."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence

from lit_dps.report.figures import Picture
from lit_dps.report.result_table import FASTEST


def text_of(text: object) -> str:
    """Return a text as HTML."""
    return html.escape(str(text))


def elements(tag: str, texts: Iterable[object]) -> str:
    """Return an element for each text; the tag may have attributes, as p class="of"."""
    name = tag.split()[0]
    return "".join(f"<{tag}>{text_of(text)}</{name}>" for text in texts)


def html_table(rows: Sequence[Mapping[str, str]], name: str = "") -> str:
    """Return a table of texts, which scrolls in its own box.

    Args:
        rows: At least one; they all have the same columns, the last one for marks.
        name: The id of the table.
    """
    heads = elements('th scope="col"', rows[0])
    body = ""
    for row in rows:
        *_, marks = row.values()
        attributes = ' class="best"' if marks.startswith(FASTEST) else ""
        body += f"<tr{attributes}>{elements('td', row.values())}</tr>"
    attributes = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll" tabindex="0"><table{attributes}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def preformatted(text: str) -> str:
    """Return a text of aligned columns, which scrolls in its own box; empty without a text."""
    if not text:
        return ""
    return f'<pre tabindex="0">{text_of(text)}</pre>'


def folded(title: str, content: str, is_printed: bool = True) -> str:
    """Return a section that opens on a click; empty without content.

    Args:
        title: Its title.
        content: HTML.
        is_printed: Whether it is open in print.
    """
    if not content:
        return ""
    name = ' class="printed"' if is_printed else ""
    return f"<details{name}><summary>{text_of(title)}</summary>{content}</details>"


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with their texts."""
    items = "".join(f"<dt>{text_of(name)}</dt><dd>{text_of(text)}</dd>" for name, text in rows)
    return f"<dl>{items}</dl>"


def picture_element(picture: Picture, file: str) -> str:
    """Return a picture with its caption, and buttons that save it.

    Args:
        picture: The picture.
        file: The name of the file that it is saved as, without suffix.
    """
    media_type = {"svg": "image/svg+xml", "png": "image/png"}[picture.kind]
    source = f"data:{media_type};base64,{b64encode(picture.data).decode()}"
    kinds = ["png"]
    if picture.kind == "svg":
        kinds.insert(0, "svg")
    buttons = ""
    for kind in kinds:
        label = text_of(f"Save {file} as {kind.upper()}")
        buttons += (
            f'<button type="button" class="save" data-kind="{kind}" data-file="{text_of(file)}" '
            f'aria-label="{label}" hidden>Save {kind.upper()}</button>'
        )
    caption = text_of(picture.caption[:1].upper() + picture.caption[1:])
    return (
        f'<figure><div class="plate"><img src="{source}" alt="Plot: {caption}" '
        f'width="{picture.width}" height="{picture.height}"></div>'
        f"<figcaption>{caption}. {buttons}</figcaption></figure>"
    )
