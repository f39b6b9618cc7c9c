"""What a cell shows besides text: objects that draw themselves, and matplotlib's figures. Runs in the interpreter process."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_TOTAL_BYTES = 8 * 1024 * 1024  # of one cell
MAX_PICTURES = 100  # of one cell
MIME_TYPES = ("image/png", "image/jpeg", "image/svg+xml")

_METHODS = {"_repr_png_": "image/png", "_repr_jpeg_": "image/jpeg", "_repr_svg_": "image/svg+xml"}


class Pictures:
    """Collects what a cell shows; what is too much is left out, and the output says so."""

    def __init__(self) -> None:
        self._collected: list[tuple[str, bytes]] = []

    def take(self) -> list[tuple[str, bytes]]:
        """(MIME type, data) of each picture since the last call."""
        collected, self._collected = self._collected, []
        return collected

    def display(self, *objects: object) -> None:
        """The builtin `display`: show each object as a picture if it can be one, else print its repr."""
        for shown in objects:
            if not self.show(shown):
                print(repr(shown))

    def show(self, shown: object) -> bool:
        """Collect `shown` if it can be drawn; says whether it can."""
        try:
            picture = _picture_of(shown)
        except Exception as error:
            print(f"[a picture could not be drawn: {error!r}]")
            return False
        if picture is not None:
            self._add(*picture)
        return picture is not None

    def show_open_figures(self) -> None:
        """At the end of a cell: draw and close the figures that matplotlib has open."""
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot is not None else ():
            self.show(pyplot.figure(number))

    def _add(self, mime: str, data: bytes) -> None:
        total = sum(len(other) for _, other in self._collected)
        if len(self._collected) == MAX_PICTURES:
            print(f"[a picture is left out: a cell shows at most {MAX_PICTURES}]")
        elif total + len(data) > MAX_TOTAL_BYTES:
            print(f"[a picture of {len(data)} bytes is left out: those of a cell take at most {MAX_TOTAL_BYTES}]")
        else:
            self._collected.append((mime, data))


def _picture_of(shown: object) -> tuple[str, bytes] | None:
    """What IPython's display protocol gives for `shown`, as far as it is a picture; None when it is none."""
    kind = type(shown)  # classes have the methods as well, but cannot be drawn
    if kind.__name__ == "Figure" and kind.__module__ == "matplotlib.figure":
        return "image/png", _draw(shown)
    if hasattr(kind, "_repr_mimebundle_"):
        bundle: Any = kind._repr_mimebundle_(shown)
        data = bundle[0] if isinstance(bundle, tuple) else bundle  # with its metadata
        for mime in MIME_TYPES:
            if isinstance(data, dict) and data.get(mime):
                return mime, _bytes_of(mime, data[mime])
    for method, mime in _METHODS.items():
        if hasattr(kind, method):
            drawn = getattr(kind, method)(shown)
            drawn = drawn[0] if isinstance(drawn, tuple) else drawn
            if drawn:
                return mime, _bytes_of(mime, drawn)
    return None


def _draw(figure: Any) -> bytes:
    """A figure of matplotlib, which is closed so that it is not shown again at the end of the cell."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
    return buffer.getvalue()


def _bytes_of(mime: str, data: bytes | str) -> bytes:
    if isinstance(data, bytes):
        return data
    if mime == "image/svg+xml":
        return data.encode()
    import base64

    return base64.b64decode(data)
