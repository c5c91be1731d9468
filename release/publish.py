"""`make publish REPO=owner/name`: a copy of the repository with its home filled in, ready to upload.

Every file that git tracks is copied with the placeholder of the repository's address replaced by owner/name;
the built notebooks, which the badges open, are in its dist/. UPLOAD.md lists what to upload where."""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import tpukit
from release import notebooks, twins

ROOT = notebooks.ROOT
PLACEHOLDER = "TPUKIT_" + "SOURCE"  # in two parts: this file is published too
UNTIL_PUBLISHED = re.compile(rb"[^\n]*<!-- until published -->\n\n?")  # what pages say before that
REPOSITORY = re.compile(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")

UPLOAD = """\
# What to upload where

This folder is {repository} with every address filled in. It changes nothing online by itself.

1. **GitHub.** Create the empty public repository https://github.com/{repository}, then, in this folder:

       git init -b main && git add -A && git commit -m "tpukit {version}"
       git remote add origin https://github.com/{repository} && git push -u origin main

   The badges in README.md and docs/NOTEBOOKS.md then open the notebooks in dist/ on Colab and Kaggle.
2. **Kaggle**, without GitHub: *Create > New Notebook > File > Import Notebook*, and choose a file
   of dist/ (Chinese: dist/zh-CN/). The accelerator is preselected; the library is inside, so the internet may
   stay off.
3. **Colab**, without GitHub: *File > Upload notebook*, and choose a file of dist/.
4. **Releases** (wheel, notebooks with outputs, checksums) are made on GitHub of a tag: section 11 of
   docs/CONTRIBUTING.md.

The notebooks in dist/:

{notebooks}
"""
OUTDATED = """
**Before that:** the table of environments in docs/STATUS.md is of another tree than this one. `make twins`
renews it, in about an hour; then publish again.
"""


def main():
    parser = argparse.ArgumentParser(prog="python -m release.publish", description=__doc__.partition("\n")[0])
    parser.add_argument("repository", help="where the repository will live on GitHub: owner/name")
    parser.add_argument(
        "--out", type=Path, help="folder to write to, which must not exist (default: dist/publish/NAME)"
    )
    given = parser.parse_args()
    try:
        out = publish(
            given.repository, given.out or ROOT / "dist/publish" / given.repository.rpartition("/")[2]
        )
    except ValueError as error:
        sys.exit(f"make publish: {error}")
    print(f"{out}: read {out / 'UPLOAD.md'}")


def publish(repository, out):
    """Write the published repository into the new folder `out`. Returns it.

    Raises:
        ValueError: `repository` is not owner/name, `out` exists, or this is not a git checkout.
    """
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(
            f"REPO={repository!r} is not an owner/name of GitHub; for instance: make publish REPO=ada/tpukit"
        )
    if out.exists():
        raise ValueError(f"{out} exists already: remove it, or publish to another folder")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise ValueError(
            f"{ROOT} is not a git checkout, so which files to publish is not known: clone the repository"
            " with git"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=out.parent))
    for name in listed.stdout.split("\0")[:-1]:
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (new / name).symlink_to((ROOT / name).readlink())
            continue
        content = (ROOT / name).read_bytes()
        if name.endswith(".md"):
            content = UNTIL_PUBLISHED.sub(b"", content)
        (new / name).write_bytes(content.replace(PLACEHOLDER.encode(), repository.encode()))
        shutil.copymode(ROOT / name, new / name)
    # Built from the copy: the library inside a notebook has its home filled in too.
    subprocess.run(
        [sys.executable, "-m", "release.notebooks", "--out", "dist"],
        cwd=new,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    names = "\n".join(f"- {path.relative_to(new).as_posix()}" for path in sorted(new.glob("dist/**/*.ipynb")))
    ignored = new / ".gitignore"
    ignored.write_text(
        "".join(line for line in ignored.read_text().splitlines(keepends=True) if line.strip() != "dist/")
    )
    upload = UPLOAD.format(repository=repository, version=tpukit.__version__, notebooks=names)
    if twins.tree() not in (ROOT / "docs/STATUS.md").read_text():
        upload += OUTDATED
    (new / "UPLOAD.md").write_text(upload)
    new.chmod(0o755)
    new.rename(out)
    return out


if __name__ == "__main__":
    main()
