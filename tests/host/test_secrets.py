"""Tokens from the environment, Colab and Kaggle, and text without them."""

import json
import sys
import types

import pytest

from tpukit.host import secrets


@pytest.fixture(autouse=True)
def _none_found(monkeypatch):
    monkeypatch.setattr(secrets, "_found", set())
    monkeypatch.delenv("MY_TOKEN", raising=False)


@pytest.fixture(params=["colab", "kaggle"])
def vault(request, monkeypatch):
    """The secrets of a platform, which raises for a name that it does not have, as both do."""
    values = dict(MY_TOKEN="of-the-platform")
    if request.param == "colab":
        module, reader = "google.colab", dict(userdata=types.SimpleNamespace(get=values.__getitem__))
    else:
        module, client = "kaggle_secrets", types.SimpleNamespace(get_secret=values.__getitem__)
        reader = dict(UserSecretsClient=lambda: client)
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**reader))
    return values


def test_a_secret_is_that_of_the_environment_or_of_the_platform_or_none(vault, monkeypatch):
    assert secrets.find("MY_TOKEN") == "of-the-platform" and secrets.find("OTHER") is None
    monkeypatch.setenv("MY_TOKEN", "of-the-environment")
    assert secrets.find("MY_TOKEN") == "of-the-environment"


@pytest.mark.parametrize("value", [None, " \n"])
def test_elsewhere_nothing_is_found_and_a_blank_secret_is_none(value, monkeypatch):
    if value is not None:
        monkeypatch.setenv("MY_TOKEN", value)
    assert secrets.find("MY_TOKEN") is None


def test_what_was_found_is_hidden_in_text_also_quoted_for_an_address(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a/b+c d")
    assert secrets.hide("a/b+c d") == "a/b+c d"  # unknown so far
    secrets.find("MY_TOKEN")
    quoted = "key a/b+c d, in https://x?k=a%2Fb%2Bc%20d&l=a/b%2Bc%20d."
    assert secrets.hide(quoted) == "key ***, in https://x?k=***&l=***."


@pytest.mark.parametrize("pasted", ["hf_SECRET\n", "\r\nhf_SECRET\r", " hf_SECRET\t"])
def test_a_token_that_was_pasted_with_a_newline_is_used_without_it(pasted, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", pasted)
    assert secrets.find("MY_TOKEN") == "hf_SECRET"
    assert "SECRET" not in secrets.hide(f"Illegal header value {b'Bearer ' + pasted.encode()!r}")


@pytest.mark.parametrize("value", ["hf_SEC\nRET", "hf_SEC\x00RET", "hf_SEC\u00e9RET", "hf_SEC\\RET"])
@pytest.mark.parametrize(
    "shown", [repr, lambda value: repr(value.encode()), json.dumps], ids=["str", "bytes", "json"]
)
def test_what_was_found_is_hidden_as_messages_of_libraries_show_it(shown, value, vault):
    vault["MY_TOKEN"] = value
    secrets.find("MY_TOKEN")
    hidden = secrets.hide(f"Illegal header value {shown(value)}")
    assert "SEC" not in hidden and "RET" not in hidden and "***" in hidden
