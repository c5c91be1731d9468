"""What has changed in the images of Colab and Kaggle, by recorded and hostile lists; none is downloaded."""

import pytest

from release import images

# Lines of Kaggle/docker-python (tpu/config.txt, requirements.in and Dockerfile; October 2025), shortened.
KAGGLE = """\
BASE_IMAGE=python:3.12
PYTHON=cp312
TORCH_VERSION=2.8.0
# libtpu==9.9.9
https://download.pytorch.org/whl/cpu/torch-${TORCH_VERSION}%2Bcpu-${PYTHON}-${PYTHON}-manylinux_2_28_x86_64.whl
https://storage.googleapis.com/a/torch_xla-${TORCH_VERSION}-${PYTHON}-${PYTHON}-manylinux_2_28_x86_64.whl
jax[tpu]
keras>3
timm
RUN uv pip install --system libtpu==0.0.17 && true
"""
KNOWN = dict(
    python="3.12", lists=["a/list"], unlisted=["numpy"], lacks=["scikit-image", "tyro"],
    packages=["torch==2.8.0", "torch_xla==2.8.0", "jax==0.10.2", "libtpu==0.0.17", "numpy==2.5.0", "timm"],
)  # fmt: skip


def differences(text):
    return list(images.differences(KNOWN, *images.read(text)))


def test_an_image_that_is_as_images_toml_says_differs_in_nothing():
    assert differences(KAGGLE) == []


@pytest.mark.parametrize(
    "old, new, row",
    [
        ("python:3.12", "python:3.14", ("Python", "3.12", "3.14")),
        ("TORCH_VERSION}-", "OTHER}2.9.0-", ("torch_xla", "2.8.0", "gone")),
        ("jax[tpu]", "jax[tpu]==0.11.0", ("jax", "0.10.2", "0.11.0")),
        ("timm\n", "", ("timm", "there", "gone")),
        ("timm\n", "timm\nscikit_image==0.26\n", ("scikit-image", "not there", "0.26")),
        # what a list says beside names and versions gets nowhere
        ("timm\n", "timm\ntyro==1.0](https://evil.example) @all\n", ("tyro", "not there", "1.0")),
        ("timm\n", "timm\ntyro==$(date)\nscikit-image==" + "9" * 5000 + "\n", None),
    ],
)
def test_one_change_of_a_list_is_one_difference(old, new, row):
    assert old in KAGGLE
    assert differences(KAGGLE.replace(old, new)) == ([row] if row else [])


# Lines of its Dockerfile.tmpl and kaggle_requirements.txt (August 2026), shortened: the base brings torch.
UPON_COLAB = """\
FROM us-docker.pkg.dev/colab-images/public/runtime:release-colab-external-images_20260514-060047_RC00
ARG PACKAGE_PATH=/usr/local/lib/python3.12/dist-packages
ipywidgets==8.1.5
"""


def test_an_image_upon_another_differs_once_the_other_is_of_another_day():
    known = dict(
        python="3.12", lists=["a/list"], built_upon=["colab-image==20260514"], unlisted=["torch"], lacks=[],
        packages=["torch==2.10.0", "ipywidgets==8.1.5"],
    )  # fmt: skip
    assert not list(images.differences(known, *images.read(UPON_COLAB)))
    newer = images.read(UPON_COLAB.replace("20260514", "20261101"))
    assert list(images.differences(known, *newer)) == [("colab-image", "20260514", "20261101")]


@pytest.mark.parametrize(
    "text, code", [(KAGGLE, 0), (KAGGLE.replace("timm\n", ""), 1), ("<html>", 2), ("", 2)]
)
def test_the_exit_code_tells_a_change_from_a_list_that_cannot_be_read(text, code, monkeypatch, capsys):
    monkeypatch.setattr(images, "KNOWN", dict(Image=KNOWN))
    monkeypatch.setattr(images, "fetch", lambda path: text)
    with pytest.raises(SystemExit) as end:
        images.main()
    assert end.value.code == code and ("| Image | timm |" in capsys.readouterr().out) == (code == 1)
