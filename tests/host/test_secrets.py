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


class Vault:
    """Records what it is asked, and raises for a name that it does not have, as both platforms do."""

    def __init__(self, **values):
        self.values, self.asked = values, []

    def get(self, name):
        self.asked.append(name)
        return self.values[name]

    get_secret = get


@pytest.fixture(params=["colab", "kaggle"])
def vault(request, monkeypatch):
    found = Vault(MY_TOKEN="of-the-platform")
    if request.param == "colab":
        colab = types.ModuleType("google.colab")
        colab.userdata = found
        monkeypatch.setitem(sys.modules, "google.colab", colab)
    else:
        kaggle = types.ModuleType("kaggle_secrets")
        kaggle.UserSecretsClient = lambda: found
        monkeypatch.setitem(sys.modules, "kaggle_secrets", kaggle)
    return found


def test_a_platforms_secret_is_found_by_name_and_a_missing_one_is_none(vault):
    assert secrets.find("MY_TOKEN") == "of-the-platform" and secrets.find("OTHER") is None
    assert vault.asked == ["MY_TOKEN", "OTHER"]


def test_the_environment_comes_first_and_is_left_as_it_is(vault, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "of-the-environment")
    assert secrets.find("MY_TOKEN") == "of-the-environment" and vault.asked == []


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
    vault.values["MY_TOKEN"] = value
    secrets.find("MY_TOKEN")
    hidden = secrets.hide(f"Illegal header value {shown(value)}")
    assert "SEC" not in hidden and "RET" not in hidden and "***" in hidden
