"""What the documentation site has beyond the files of docs/: a hook of MkDocs.

The pages of the API, which docs/reference/api has as text, are shown by mkdocstrings here, and the tables of
benchmarks/ are added to their page. CHANGELOG.md and CONTRIBUTING.md become pages as they are. Pages link to
other files of the repository by relative paths, as on a code host; on the site these are pages with the
file's text, or copies of pictures.
"""

import posixpath
import re
from pathlib import Path

import api_pages
from measurements import all_measurements, as_markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "source"  # folder of the site for files of the repository
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".cff": "yaml", ".yml": "yaml"}
PICTURES = (".png", ".svg")
# Files of the repository that are pages of their own.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks": "benchmarks.md",
}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
FENCE = re.compile(r"(^(`{3,}|~{3,}).*?^\2[^\S\n]*$)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation of the API reference."""
    for section in config.nav or []:
        for entry in section.get("Reference", ()):
            if isinstance(entry, dict) and "API" in entry:
                entry["API"] = list(api_pages.pages())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and what pages link to outside of docs/."""
    generated = {
        **api_pages.pages(),
        "benchmarks.md": (ROOT / "docs" / "benchmarks.md").read_text() + benchmark_sections(),
        "changelog.md": moved("CHANGELOG.md", "changelog.md"),
        "contributing.md": moved("CONTRIBUTING.md", "contributing.md"),
    }
    for uri, text in generated.items():
        _replace(files, File.generated(config, uri, content=text))
    for page in list(files.documentation_pages()):
        for path in outside_links(page.content_string, page.src_uri):
            if path not in PAGES:
                _add_source(files, config, path)
    return files


def benchmark_sections() -> str:
    """Every table of benchmarks/ as a section of a page, with its command, machine and picture."""
    text = ""
    for path, measured in all_measurements().items():
        picture = path.with_suffix(".png")
        shown = f"\n![{measured.title}](../benchmarks/{picture.name})\n" if picture.exists() else ""
        tables = "\n".join(f"**{t.title}**\n\n{as_markdown(t.columns, t.rows)}" for t in measured.tables)
        text += (
            f"### {path.stem}: {measured.title}\n\n{measured.provenance}.\n{shown}\n"
            f'<details markdown="1"><summary>Table</summary>\n\n{tables}\n</details>\n\n'
        )
    return text


def moved(path: str, uri: str) -> str:
    """A page of the repository as the page `uri` of docs/: its links lead where they led."""
    home = posixpath.dirname("docs/" + uri)

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        return f"{found[1]}({posixpath.relpath(posixpath.join(posixpath.dirname(path), target), home)})"

    return LINK.sub(link, (ROOT / path).read_text())


def outside_links(text: str, uri: str) -> set[str]:
    """The files of the repository outside of docs/ to which a page links, by their paths in it."""
    found = set()
    for _, target in LINK.findall(FENCE.sub("", text)):
        path = _outside(target, uri)
        if path is not None:
            found.add(path)
    return found


def _outside(target: str, uri: str) -> str | None:
    """The path in the repository that a link of a page leads to, None if it stays in docs/."""
    if re.match(r"[a-z]+:|#|/", target):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target.partition("#")[0]))
    if path == "docs" or path.startswith("docs/"):
        return None
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"docs/{uri} links to {target}: there is no {path}")
    return path


def _site_uri(path: str) -> str:
    """Where a file of the repository lies on the site."""
    if path in PAGES:
        return PAGES[path]
    return f"{SOURCES}/{path}" if path.endswith(PICTURES) else f"{SOURCES}/{path}.md"


def _add_source(files: Files, config: MkDocsConfig, path: str) -> None:
    uri, file = _site_uri(path), ROOT / path
    if files.get_file_from_path(uri) is not None:
        return
    if path.endswith(PICTURES):
        files.append(File.generated(config, uri, abs_src_path=str(file)))
        return
    if file.is_dir():
        names = sorted(p.name for p in file.iterdir() if not p.name.startswith(("_", ".")))
        body = "\n".join(f"- `{name}`" for name in names)
    elif file.suffix == ".md":
        body = moved(path, uri)
    else:
        body = f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n````"
    page = File.generated(config, uri, content=f"# {path}\n\nA copy from the repository.\n\n{body}\n")
    page.inclusion = page.inclusion.NOT_IN_NAV
    files.append(page)
    for further in outside_links(page.content_string, uri):
        if further not in PAGES:
            _add_source(files, config, further)


def _replace(files: Files, file: File) -> None:
    old = files.get_file_from_path(file.src_uri)
    if old is not None:
        files.remove(old)
    files.append(file)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/ lead to the copies on the site."""
    uri = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        path = _outside(found[2], uri)
        if path is None:
            return found[0]
        anchor = found[2].partition("#")[2]
        target = posixpath.relpath(_site_uri(path), posixpath.dirname(uri) or ".")
        return f"{found[1]}({target}{'#' + anchor if anchor else ''})"

    parts = FENCE.split(markdown)  # text, block, its fence, text, ...
    return "".join(LINK.sub(link, part) if i % 3 == 0 else part for i, part in enumerate(parts) if i % 3 != 2)
