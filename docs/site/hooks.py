"""What MkDocs does not know of this repository: which of its files are pages, and what a page's links mean.

README.md is the site's front page and CHANGELOG.md its changelog, so that no text exists twice. A link to a file that
the site has not (a folder of examples) becomes the file's name. Decisions list themselves.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Pages that are files elsewhere in the repository.
ELSEWHERE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, "decisions/index.md", content=decisions()))
    return files


def decisions() -> str:
    """The list of all decisions, by number."""
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    titles = [(page.name, page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")) for page in pages]
    return "# Decisions\n\nWhy things are as they are.\n\n" + "".join(
        f"* [{title}]({name})\n" for name, title in titles
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead from the repository's file to the site's pages."""
    here = posixpath.dirname(ELSEWHERE.get(page.file.src_uri) or f"docs/{page.file.src_uri}")
    sites = {path: name for name, path in ELSEWHERE.items()}

    def link(found: re.Match[str]) -> str:
        text, place, anchor = found.group(1), found.group(2), found.group(3) or ""
        path = posixpath.normpath(posixpath.join(here, place))
        name = sites.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(name) is None and (ROOT / path).exists():
            return text
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"[{text}]({posixpath.relpath(name, start)}{anchor})"

    return LINK.sub(link, markdown)
