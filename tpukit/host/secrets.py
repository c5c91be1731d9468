"""Tokens from where a platform keeps them, and text without them. None is ever printed, saved, or put into
the environment."""

import contextlib
import json
import os
import urllib.parse

_found: set[str] = set()  # every value that was read here, for `hide`


def find(name: str) -> str | None:
    """The secret of a name, or None: from the environment, Colab's secrets (the key at the left), or Kaggle's
    (Add-ons)."""
    value = os.environ.get(name) or _from_platform(name)
    value = (value or "").strip()  # a newline that was copied along is in no token, and breaks headers
    if value:
        _found.add(value)
    return value or None


def _from_platform(name: str) -> str | None:
    # Another platform, no such secret, no access for this notebook, or no page to ask
    with contextlib.suppress(Exception):
        from google.colab import userdata

        return userdata.get(name)
    with contextlib.suppress(Exception):
        from kaggle_secrets import UserSecretsClient

        return UserSecretsClient().get_secret(name)


def hide(text: object) -> str:
    """The text with every secret that was read here replaced by ***: as it is, quoted for an address, or as
    Python or JSON shows it."""
    text = str(text)
    for value in _found:
        encoded = value.encode(errors="surrogateescape")
        forms = {value, urllib.parse.quote(encoded), urllib.parse.quote(encoded, safe="")}
        forms |= {repr(value)[1:-1], repr(encoded)[2:-1], json.dumps(value)[1:-1]}
        for form in sorted(forms, key=len, reverse=True):  # one may be a part of another
            text = text.replace(form, "***")
    return text
