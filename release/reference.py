"""`python -m release.reference`: docs/REFERENCE.md and its Chinese page, from the docstrings of what `tpukit`
exports. The code is read, not imported, so that every Python writes the same pages."""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import tpukit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tpukit"
# (headings, introductions) in English and Chinese, and the names of each group.
GROUPS = (
    (
        ("Machine and data", "机器和数据"),
        (
            "What is here, and where the dataset lies. None of these opens a device.",
            "这里有什么，数据集在哪里。它们都不打开任何设备，所以之后仍然可以启动各个核。",
        ),
        ("detect", "Environment", "find_dataset", "find_run", "mount_drive", "simulate", "TpukitError"),
    ),
    (
        ("Training", "训练"),
        (
            "A task and a run go in; the run's folder is the result.",
            "传入一个任务和一份训练记录，结果就在训练记录的文件夹里：检查点、最好的权重、数据记录和日志。",
        ),
        ("Run", "launch", "train", "train_core", "test", "CoreFailed"),
    ),
    (
        ("Looking at a run", "查看训练记录"),
        (
            "Each of these shows something in a notebook, and prints or saves it in a shell.",
            "在笔记本里显示，在命令行里则打印或保存。没有打开的页面时，用一张图代替控件。",
        ),
        (
            "live",
            "show",
            "show_report",
            "show_predictions",
            "explore",
            "compare_runs",
            "show_own",
            "save_zip",
            "show_task",
            "show_samples",
            "show_labels",
            "show_plan",
            "show_comparison",
        ),
    ),
    (
        ("Using a trained model, and planning one", "使用训练好的模型，以及规划训练"),
        (
            "Predict files, write the network for other programs, ask the TPU's compiler.",
            "预测文件，把网络写成其他程序能用的形式，询问 TPU 的编译器。",
        ),
        ("predict", "export", "plan"),
    ),
    (
        ("Tasks", "任务"),
        (
            "A task's fields are its whole configuration, and the options of `tpukit train`. The settings of"
            " `Task` belong to every task.",
            "任务的字段就是它的全部配置，也就是 `tpukit train` 的选项。`Task` 的设置属于每个任务；"
            "各任务下面只列出它自己的设置。",
        ),
        ("Task", "MNIST", "MSHNet", "CDEIT", "ImageClassifier", "LanguageModel"),
    ),
)
TOPS = (
    """# Reference: every function, class and setting

[中文](REFERENCE.zh-CN.md) · [README](../README.md) · [The library](LIBRARY.md) · \
[Your own model](YOUR_DATA.md#your-own-model)

**What does each public name take, return and raise?** Below, in the order in which a training uses them. \
This page is made from the docstrings (`python -m release.reference`); `help(tpukit.launch)` shows the same.
""",
    """# 参考：全部函数、类和设置

[English](REFERENCE.md) · [README](../README.zh-CN.md) · [库](LIBRARY.zh-CN.md) · \
[你自己的模型](YOUR_DATA.zh-CN.md#你自己的模型)

**每个公开的名字接受什么、返回什么、报什么错？** 见下文，按训练中用到的先后排列。\
本页由代码里的文档字符串生成（`python -m release.reference`），标题和引言是中文，说明保持英文原文；\
`help(tpukit.launch)` 显示的是同样的内容。各功能的中文说明见[库](LIBRARY.zh-CN.md)、[训练](TRAINING.zh-CN.md)\
和[训练记录](RUNS.zh-CN.md)，设置的含义见[训练](TRAINING.zh-CN.md#学习率内存微调以及何时停止)一页，\
术语的中英对照见[术语表](GLOSSARY.md)。
""",
)


def pages() -> tuple[str, str]:
    """The English and the Chinese page."""
    return page(0), page(1)


def page(language: int) -> str:
    """The page in one language. language: 0 for English, 1 for Chinese."""
    parts = [TOPS[language]]
    for titles, introductions, names in GROUPS:
        parts.append(f"## {titles[language]}\n\n{introductions[language]}\n")
        parts += [entry(name) for name in names]
    return "\n".join(parts)


def entry(name: str) -> str:
    """The heading, signature and docstring of a public name; for a class also its fields and methods."""
    node = definition(tpukit._HOMES[name], name)
    head = f"### `tpukit.{name}`\n"
    if isinstance(node, ast.FunctionDef):
        return "\n".join([head, code(signature(node)), prose(node)])
    parts = [head, *([prose(node)] if ast.get_docstring(node) else [])]
    parts += ["\n".join(fields) + "\n"] if (fields := list(fields_of(node))) else []
    for method in node.body:
        if (
            isinstance(method, ast.FunctionDef)
            and not method.name.startswith("_")
            and ast.get_docstring(method)
        ):
            parts += [code(f"{name}.{signature(method)}"), prose(method)]
    return "\n".join(parts)


def definition(module: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Where a name is defined: in a module of tpukit (such as "runs.run"), or where that imports it from."""
    path = PACKAGE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return definition(node.module.removeprefix("tpukit."), name)
    raise LookupError(f"{path} does not define {name}")


def signature(node: ast.FunctionDef) -> str:
    """name(arguments) -> type, without `self` and `cls`; a property by its name alone."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(decorator.endswith("property") for decorator in decorators):
        return node.name
    arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    return f"{node.name}({arguments})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def fields_of(node: ast.ClassDef) -> Iterator[str]:
    """A line for each field of a class that is followed by its description."""
    for field, after in zip(node.body, node.body[1:]):
        if isinstance(field, ast.AnnAssign) and (text := text_of(after)):
            value = field.value
            if isinstance(value, ast.Call) and value.args:  # setting(default, free=...)
                value = value.args[0]
            default = f" = {ast.unparse(value)}" if value else ""
            kind = ast.unparse(field.annotation)
            yield f"- `{ast.unparse(field.target)}: {kind}{default}` {' '.join(escape(text).split())}"


def text_of(node: ast.stmt) -> str:
    """The text of a statement that is a string alone; empty for any other."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def code(text: str) -> str:
    return textwrap.indent("\n".join(textwrap.wrap(text, 100, subsequent_indent="    ")), "    ") + "\n"


def prose(node) -> str:
    """The docstring as Markdown: its paragraphs, each on one line."""
    paragraphs = (ast.get_docstring(node) or "").split("\n\n")
    return "\n\n".join(" ".join(escape(paragraph).split()) for paragraph in paragraphs) + "\n"


def escape(text: str) -> str:
    """Text whose stars and brackets outside `code` are no markup."""
    parts = text.split("`")
    return "`".join(
        re.sub(r"([*<\[])", r"\\\1", part) if n % 2 == 0 else part for n, part in enumerate(parts)
    )


if __name__ == "__main__":
    for name, text in zip(("REFERENCE.md", "REFERENCE.zh-CN.md"), pages()):
        (ROOT / "docs" / name).write_text(text)
