"""The published repository: its home filled in everywhere, the badges lead to the built notebooks."""

import re
import shutil
import subprocess

import pytest

from release import publish, twins
from tests.conftest import ROOT

if not shutil.which("git") or subprocess.run(["git", "status"], cwd=ROOT, capture_output=True).returncode:
    pytest.skip(
        "git or the checkout is missing: what is published are the files that git tracks",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    if publish.PLACEHOLDER not in (ROOT / "docs/sky/v5e-1.yaml").read_text():
        pytest.skip("this copy is published: its home is filled in already")
    return publish.publish("ada/lace", tmp_path_factory.mktemp("out") / "lace")


def test_no_placeholder_is_left_in_any_file(published):
    for path in published.rglob("*"):
        if path.is_file():
            assert publish.PLACEHOLDER.encode() not in path.read_bytes(), path
    assert "ada/lace" in (published / "docs/sky/v5e-1.yaml").read_text()


@pytest.mark.parametrize("folder", ["notebooks", "notebooks/zh-CN"])
def test_the_notebooks_of_the_copy_import_the_library_of_the_copy(folder, published):
    link = published / folder / "tpukit"
    assert link.is_symlink() and link.resolve() == published.resolve() / "tpukit"


def test_what_pages_say_until_they_are_published_is_left_out(published):
    for page in ("README.md", "README.zh-CN.md", "docs/NOTEBOOKS.md", "docs/COLAB_GUIDE.md"):
        assert "until published -->" in (ROOT / page).read_text()
        assert "until published -->" not in (published / page).read_text()


def test_who_publishes_is_told_whether_the_table_of_environments_is_of_this_tree(published):
    is_current = twins.tree() in (ROOT / "docs/STATUS.md").read_text()
    assert ("make twins" in (published / "UPLOAD.md").read_text()) == (not is_current)


def test_every_badge_leads_to_a_built_notebook_that_is_there_and_not_ignored(published):
    pages = [published / "README.md", published / "README.zh-CN.md", *published.glob("docs/*.md")]
    opened = {
        name
        for page in pages
        for name in re.findall(r"github(?:\.com)?/ada/lace/blob/main/([^)\s]+\.ipynb)", page.read_text())
    }
    assert len(opened) >= 9
    assert all(name.startswith("dist/") and (published / name).is_file() for name in opened)
    subprocess.run(["git", "init", "-q"], cwd=published, check=True)
    ignored = subprocess.run(
        ["git", "check-ignore", *opened], cwd=published, capture_output=True, text=True
    ).stdout
    assert ignored == ""
    listed = (published / "UPLOAD.md").read_text()
    assert all(name in listed for name in opened) and "github.com/ada/lace" in listed


@pytest.mark.parametrize(
    "name", ["", "ada", "ada/", "/lace", "ada/la ce", "ada/lace/x", "-ada/lace", "ada/..", "ada/$(date)"]
)
def test_what_is_no_repository_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        publish.publish(name, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_as_it_is(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        publish.publish("ada/lace", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
