"""Pages of HTML, as a parser sees them."""

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """A page: its text, its elements, and what keeps it from being one of its own."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.problems: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"{tag} is not closed" for tag in self.open]
        ids = [found["id"] for _, found in self.tags if "id" in found]
        self.problems += [f"id {one} twice" for one in ids if ids.count(one) > 1]
        links = re.findall(r'(?:url\(#|href="#)([^)"]+)', text)
        self.problems += [f"#{link} is nowhere" for link in links if link not in ids]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (re.search(r"//", value or "") and "xmlns" not in name):
                self.problems.append(f"{tag} {name}={value}")
        if tag == "script" or (tag == "use" and "href" not in dict(attrs)):
            self.problems.append(f"{tag}: {attrs}")

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"/{tag} ends nothing")

    def handle_data(self, data):
        if data.strip() and self.open[-1:] not in (["title"], ["style"]):
            self.cells.append(data.strip())

    def after(self, cell: str) -> str:
        """The text of the cell after the last one of a text."""
        return self.cells[len(self.cells) - self.cells[::-1].index(cell)]
