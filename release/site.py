"""Hooks of MkDocs, which makes a site of the pages (mkdocs.yml): README becomes its first page, and links to
other files of the repository lead to GitHub."""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/TPUKIT_SOURCE/blob/main"
FIRST = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}
LINK = r"(\]\(|src=\")(?!\w+:|#)([^)\s#\"]+)"


def on_files(files, config):
    """Add README, which lies outside of docs/."""
    for name, page in FIRST.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, **_):
    """Return the page's text with links as the site has them."""
    folder = "" if page.file.src_uri in FIRST.values() else "docs"
    return re.sub(LINK, lambda link: link[1] + address(posixpath.join(folder, link[2])), markdown)


def address(path):
    """Return where a file of the repository is on the site, or its address."""
    path = posixpath.normpath(path)
    if path in FIRST:
        return FIRST[path]
    is_shown = path.startswith("docs/") and path.endswith((".md", ".png", ".svg", ".gif"))
    return path.removeprefix("docs/") if is_shown else f"{HOME}/{path}"
