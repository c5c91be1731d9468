"""Hooks of MkDocs, which makes a site of the pages (mkdocs.yml): README becomes its first page, docstrings
of the public names become a page, and links to other files of the repository lead to GitHub."""

import copy
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = "https://github.com/TPUKIT_SOURCE/blob/main"
FIRST = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}
CHINESE = "中文"  # the part of the bar, in mkdocs.yml
ANSWERS = "OLD_GUIDES"  # the pages that say of an old name what to write today: first in a search for it
LINK = r"(\]\(|src=\")(?!\w+:|#)([^)\s#\"]+)"


def on_files(files, config):
    """Add README, which lies outside of docs/, and the page of the public names."""
    from mkdocs.structure.files import File  # here: the tests have no MkDocs

    pages = {page: (ROOT / name).read_text() for name, page in FIRST.items()}
    pages["api.md"] = reference((ROOT / "tpukit/__init__.py").read_text())
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    return files


def reference(init):
    """Return the page of the public names, from the text of tpukit/__init__.py: mkdocstrings puts a docstring
    in place of each line that starts with colons. No code is imported, because torch isn't there."""
    homes = re.findall(r"^    from (\S+) import (\w+) as \w+$", init, flags=re.M)
    lines = [f"::: {module}.{name}" for module, name in sorted(homes, key=lambda home: home[1].lower())]
    return "\n\n".join(["# API", "The public names: each is `tpukit.NAME`.", *lines])


def on_page_markdown(markdown, page, **_):
    """Return the page's text with links as the site has them, and set its rank in a search."""
    if page.file.src_uri.startswith(ANSWERS):
        page.meta["search"] = dict(boost=4)  # its sections are long, which lowers their rank
    folder = "" if page.file.src_uri in FIRST.values() else "docs"
    return re.sub(LINK, lambda link: link[1] + address(posixpath.join(folder, link[2])), markdown)


def on_page_context(context, page, nav, **_):
    """Return the context of a page with its own language alone in the bar; its first line leads to the
    other."""
    shown = copy.copy(nav)
    is_chinese = page.file.src_uri.endswith(".zh-CN.md")
    shown.items = [item for item in nav.items if (item.title == CHINESE) == is_chinese]
    return dict(context, nav=shown)


def address(path):
    """Return where a file of the repository is on the site, or its address."""
    path = posixpath.normpath(path)
    if path in FIRST:
        return FIRST[path]
    is_shown = path.startswith("docs/") and path.endswith((".md", ".png", ".svg", ".gif"))
    return path.removeprefix("docs/") if is_shown else f"{HOME}/{path}"
