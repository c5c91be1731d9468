"""The open page of a notebook, for tools that show something there."""

from tests.reporting.conftest import page as page
