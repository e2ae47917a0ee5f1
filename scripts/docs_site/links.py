"""See that every link and anchor of a built site leads somewhere: python scripts/docs_site/links.py FOLDER.

MkDocs checks the links between pages as they are written; this also checks pictures, and what plugins and
raw HTML have made. Addresses of other servers are counted, not visited.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """The targets of a page's links, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect a tag's link and anchors."""
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        target = given.get("href" if tag in ("a", "link") else "src")
        if target and not target.startswith(("data:", "javascript:")):
            self.targets.add(target)


def broken_links(site: Path) -> tuple[int, int, list[str]]:
    """Return the number of links within the site, of links to other servers, and what is wrong."""
    pages = {path: Links(path.read_text()) for path in sorted(site.rglob("*.html"))}
    num_inner = num_outer = 0
    wrong = []
    for path, links in pages.items():
        for target in sorted(links.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                num_outer += 1
                continue
            if path.name == "404.html":  # its addresses are those of a server
                continue
            num_inner += 1
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                wrong.append(f"{path.relative_to(site)}: {target}: no such file")
            elif file in pages and unquote(parts.fragment) not in pages[file].anchors:
                wrong.append(f"{path.relative_to(site)}: {target}: no such anchor")
    return num_inner, num_outer, wrong


def main() -> int:
    """Check the site in the folder that is named; the exit code."""
    site = Path(sys.argv[1]).resolve()
    num_inner, num_outer, wrong = broken_links(site)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    num_pages = len(list(site.rglob("*.html")))
    print(
        f"{num_pages} pages, {num_inner} links within the site, {len(wrong)} broken;"
        f" {num_outer} to other servers"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
