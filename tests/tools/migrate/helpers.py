"""What the tests of `tpukit migrate` share: files to check."""

import json


def written(folder, code, name="script.py"):
    path = folder / name
    path.write_text(code)
    return path


def notebook(*cells):
    code = [
        dict(cell_type="code", source=text.splitlines(True), metadata={}, outputs=[], execution_count=None)
        for text in cells
    ]
    words = dict(cell_type="markdown", source=["# Title"], metadata={})
    return json.dumps(dict(cells=[words, *code], metadata={}, nbformat=4, nbformat_minor=5), indent=1)
