"""The open page of a notebook."""

from tests.tpukit.reporting.conftest import page as page
