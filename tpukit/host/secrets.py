"""Tokens from where a platform keeps them, and text without them. None is ever printed, saved, or put into the environment."""

import contextlib
import os
import urllib.parse

_found = set()  # every value that was read here, for `hide`


def find(name):
    """The secret of a name, or None: from the environment, Colab's secrets (the key at the left), or Kaggle's (Add-ons)."""
    value = os.environ.get(name) or _from_colab(name) or _from_kaggle(name)
    if value:
        _found.add(value)
    return value or None


def _from_colab(name):
    try:
        from google.colab import userdata
    except ImportError:
        return None
    with contextlib.suppress(Exception):  # no such secret, no access given to this notebook, or no page to ask
        return userdata.get(name)


def _from_kaggle(name):
    try:
        from kaggle_secrets import UserSecretsClient
    except ImportError:
        return None
    with contextlib.suppress(Exception):  # no such secret, or not attached to this notebook
        return UserSecretsClient().get_secret(name)


def hide(text):
    """The text with every secret that was read here, as it is or quoted for an address, replaced by ***."""
    text = str(text)
    for value in _found:
        for form in {value, urllib.parse.quote(value), urllib.parse.quote(value, safe="")}:
            text = text.replace(form, "***")
    return text
