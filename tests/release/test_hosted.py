"""What GitHub runs and shows of this repository: workflows with no right too many that call what is there,
forms that can be filled in."""

import re
import subprocess

import pytest
import yaml

import tpukit
from release import twins
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"]


def steps(path):
    return [step for job in jobs(path).values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_right_that_a_job_does_not_name(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {}
    allowed = {
        ("images", "compare"): {"contents": "read", "issues": "write"},
        ("pages", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "github"): {"contents": "write"},
        ("release", "pypi"): {"id-token": "write"},
    }
    for name, job in jobs(path).items():
        assert job["permissions"] == allowed.get((path.stem, name), {"contents": "read"})
        assert 0 < job["timeout-minutes"] <= 180
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", "")  # which would put another's words into a shell


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_taken_by_its_commit_with_its_version_beside_it(path):
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in used)


def test_an_action_has_one_commit_in_all_workflows():
    used = {one for path in WORKFLOWS for one in re.findall(r"uses: (.*)", path.read_text())}
    assert len({one.partition("@")[0] for one in used}) == len(used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_calls_is_there(path):
    makefile = (ROOT / "Makefile").read_text()
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in jobs(path).values()]
    targets = [target for matrix in matrices for target in matrix.get("target", [])]
    for step in steps(path):
        targets += re.findall(r"^make (\w+)", step.get("run", ""))
        for module in re.findall(r"^python -m release\.(\w+)", step.get("run", "")):
            assert (ROOT / f"release/{module}.py").is_file()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_nightly_twins_are_those_of_images_toml():
    (matrix,) = [
        job["strategy"]["matrix"] for job in jobs(ROOT / ".github/workflows/nightly.yml").values()
        if "image" in job["strategy"]["matrix"]
    ]  # fmt: skip
    assert sorted(matrix["image"]) == sorted(map(twins.slug, twins.IMAGES))


def test_publishing_fills_in_the_home_the_owner_and_leaves_out_what_holds_until_then(tmp_path):
    commands = subprocess.check_output(["make", "-n", "publish", "REPO=me/mine"], cwd=ROOT, text=True)
    [fill] = re.findall(r"^cd dist/publish && grep(?:.*\\\n)*.*", commands, flags=re.MULTILINE)
    page, owners = tmp_path / "dist/publish/README.md", tmp_path / "dist/publish/.github/CODEOWNERS"
    owners.parent.mkdir(parents=True)
    page.write_text("github.com/TPUKIT_" + "SOURCE/blob\nsoon <!-- until " + "published -->\n")
    owners.write_text("/tpukit/ @TPUKIT_" + "OWNER\n")
    subprocess.run(fill, cwd=tmp_path, shell=True, check=True)
    assert page.read_text() == "github.com/me/mine/blob\n"
    assert owners.read_text() == "/tpukit/ @me\n"


def test_each_package_has_one_owner():
    lines = (ROOT / ".github/CODEOWNERS").read_text().splitlines()
    owned = [re.fullmatch(r"/(\w+)/ @\w[\w-]*", line)[1] for line in lines]
    assert owned == ["tpukit", "tpukit_tasks", "tpukit_tools"]


def test_newer_actions_are_proposed_each_week():
    (update,) = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert update["package-ecosystem"] == "github-actions" and update["directory"] == "/"
    assert update["schedule"]["interval"] == "weekly"


def test_hooks_before_a_commit_have_one_version_and_see_every_notebook():
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert sorted(hooks) == ["nbstripout", "ruff-check", "ruff-format"]
    pinned = [package for hook in hooks.values() for package in hook["additional_dependencies"]]
    assert all(re.fullmatch(r"\w+==[\d.]+", package) for package in pinned)
    assert len({package.partition("==")[0] for package in pinned}) == len(set(pinned))
    notebooks = [path.relative_to(ROOT) for path in (ROOT / "notebooks").rglob("*.ipynb")]
    assert notebooks and all(re.search(hooks["nbstripout"]["files"], str(path)) for path in notebooks)


def test_the_form_for_a_broken_notebook_lists_every_notebook():
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/notebook.yml").read_text())
    (listed,) = [field["attributes"]["options"] for field in form["body"] if field.get("id") == "notebook"]
    sources = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert listed == sorted(sources)


def test_a_release_has_one_version_and_one_day():
    version, day = re.findall(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version == tpukit.__version__ == cited["version"] and day == str(cited["date-released"])
