"""Writes the known errors as a page: `python -m release.troubleshooting > docs/TROUBLESHOOTING.md`."""

import sys

from tpukit.host.known_errors import KNOWN_ERRORS

HEAD = """# Troubleshooting

[中文](TROUBLESHOOTING.zh-CN.md) · [README](../README.md) · [following an older guide?](OLD_GUIDES.md)

Search this page for the text of the error, or ask tpukit, which also adds these fixes to its own errors:

    # Check this machine
    tpukit doctor
    tpukit doctor --error "Unsupported nprocs (8)"

Without a TPU, [`tpukit emulate`](TPU_GUIDE.md#without-a-tpu) runs your script on emulated chips.
"""
HARMLESS = "\n## Harmless messages\n\n| you see | what it is |\n|---|---|\n"


def page():
    """The text of the page."""
    sections, rows = [], []
    for known in KNOWN_ERRORS.values():
        if known.harmless:
            rows.append(f"| {known.title} | {known.fix.removeprefix('Harmless. ')} |\n")
        else:
            why = f" Why: {known.cause}" if known.cause else ""
            sections.append(f"\n## {known.title}\n\n{known.fix}{why}\n")
    return "".join([HEAD, *sections, HARMLESS, *rows])


if __name__ == "__main__":
    sys.stdout.write(page())
