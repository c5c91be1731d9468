"""Tokenizers for the tests of texts."""

import pytest

from tests.tasks.text.small import CHAT
from tpukit_tasks.text import hub


@pytest.fixture
def tokenizer():
    return hub.load_tokenizer("tiny")


@pytest.fixture
def chats():
    found = hub.load_tokenizer("tiny")
    found.chat_template = CHAT
    found.add_tokens(["</s>"])
    return found
