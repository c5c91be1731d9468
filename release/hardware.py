"""`python -m release.hardware`: what was seen on which hardware, from the reports in docs/hardware/.

It renews the status sentence of README and docs/STATUS, the table in docs/STATUS, in both languages, each
between its markers; and tpukit/devices/seen.json, which spares a training what a report has tried. Reports
come from strangers: one that is not what `tpukit doctor --hardware` writes, or is a rehearsal, ends the
script with its name."""

import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpukit.host.environment import release
from tpukit.host.errors import TpukitError
from tpukit.host.tables import UNPRINTABLE
from tpukit.tools.doctor.hardware import CHECKS, FORMAT, HARDWARE, PACKAGES
from tpukit.tools.doctor.hardware.checks import FAIL, INFO, PASS, SKIP

ROOT = Path(__file__).parent.parent
PAGES = (("README.md", 0), ("docs/STATUS.md", 0), ("README.zh-CN.md", 1), ("docs/STATUS.zh-CN.md", 1))
MAX_BYTES = 100_000
HOSTS = ("colab", "kaggle", "tpu-vm", "local")
NAME = re.compile(r"[\w .,+()/:=-]{1,120}", re.ASCII)
VERSION = re.compile(r"\d[\w.+-]{0,40}", re.ASCII)
# What a training tries by itself where it is not in seen.json (`devices/trial.py`): the checks that show it
TRIED = {"step": {"step"}, "all_reduce": {"all_reduce", "all_cores"}, "attention": {"attention_kernels"}}
NOBODY = (
    "**Status: everything on this page ran on CPUs; nobody has run tpukit on a TPU chip or a GPU yet.**",
    "**状态：本页的一切都只在 CPU 上运行过；还没有人在 TPU 芯片或 GPU 上运行过 tpukit。**",
)
SEEN = (
    "**Status: each figure on this page names its hardware; checked on {}{}.**",
    "**状态：本页每个数字都注明所用的硬件；检查过的硬件：{}{}。**",
)
NO_TPU = ("; nobody has run tpukit on a TPU chip yet", "；还没有人在 TPU 芯片上运行过 tpukit")
COUNTED = ("{passed} of {count} checks passed", "{count} 项检查通过 {passed} 项")
NOT_SEEN = ("not seen", "未验证")
HEADS = ("| what | seen on | what stood in for it |", "| 内容 | 在哪里验证过 | 用什么代替过 |")
WORDS = {PASS: ("holds", "成立"), FAIL: ("**does not hold**", "**不成立**"), INFO: ("measured", "已测量")}
# Check -> its sentence in Chinese, and what stood in for it, in English and Chinese.
ROWS = {
    "opens": (
        "一个进程能在一分钟内打开设备，在上面做乘法，并读出设备有多少内存。",
        "the CPU XLA device; mocks of a `/dev/vfio` in use and of a card that torch was not built for",
        "CPU XLA 设备；被占用的 `/dev/vfio` 和 torch 不支持的显卡用的是模拟对象（mock）",
    ),
    "step": (
        "重放的一步（TPU）或捕获的一步（GPU），其损失、权重和优化器状态与逐个算子执行时相同。",
        "the CPU XLA device; CUDA graphs emulated on CPU tensors; a driver that records and computes nothing",
        "CPU XLA 设备；在 CPU 张量上模拟的 CUDA graph，以及一个只记录、不计算的驱动",
    ),
    "training": (
        "单核上的一次短训练只编译一次训练步，没有算子在别处运行，并且学到了东西。",
        "MNIST on the CPU and on the CPU XLA device",
        "CPU 和 CPU XLA 设备上的 MNIST",
    ),
    "all_reduce": (
        "各核在一步中交换的梯度变成它们的平均值。",
        "CPU processes with gloo, XLA processes that reduce on the host; NCCL's and XLA's own was recorded",
        "用 gloo 的 CPU 进程、在主机上求和的 XLA 进程；NCCL 和 XLA 自己的求和只被记录过",
    ),
    "all_cores": (
        "用所有核训练（每核一个进程，在 TPU 上也作为一张图）的损失与单核训练相同。",
        "2 and 4 processes on CPUs, 8 virtual CPU devices (SPMD); mocks for eight chips",
        "CPU 上的 2 个和 4 个进程，8 个虚拟 CPU 设备（SPMD）；八块芯片的情形用的是模拟对象（mock）",
    ),
    "attention": (
        "torch 为注意力选择的核函数算得正确，训练和评估时都是。",
        "a CPU's kernels; on an H100 or H200 torch 2.11 takes cuDNN's, others in training than in evaluation",
        "CPU 的核函数；torch 2.11 在 H100 或 H200 上选用 cuDNN 的，训练和评估各不相同",
    ),
    "attention_kernels": (
        "CDEIT 的注意力核函数能运行，与分块计算的注意力一致，并且更快。",
        "interpreted on a CPU they equal plain attention; libtpu's compiler takes them for v5e and v6e",
        "在 CPU 上解释执行时与普通的注意力相等；libtpu 的编译器接受它们（v5e 和 v6e）",
    ),
    "replays": (
        "学习率变化的训练步是同一张图，什么都不等待，也不丢失内存。",
        "the CPU XLA device, whose memory cannot be read",
        "CPU XLA 设备，它的内存读不出来",
    ),
    "run_ahead": (
        "主机领先于设备时，设备内存里不会留着许多步的梯度。",
        "nothing: torch_xla lets the host run up to 32 steps ahead",
        "没有：torch_xla 允许主机最多领先 32 步",
    ),
    "precision": (
        "fp32 的乘积和卷积只有 fp32 的误差，而不是 bf16 或 TF32 的。",
        "CPUs, on which fp32 is fp32",
        "CPU，在那里 fp32 就是 fp32",
    ),
    "overflow": (
        "fp16 的一步若梯度溢出，权重保持不变，损失缩放减半。",
        "a loss scaler on the CPU, and emulated CUDA graphs",
        "CPU 上的损失缩放，以及模拟的 CUDA graph",
    ),
    "copies": (
        "复制到主机的数据就是发出请求时设备上的数据，不管之后计算什么。",
        "nothing: a CPU has no copies that could be overtaken",
        "没有：CPU 上没有会被超过的复制",
    ),
    "speed": (
        "半精度的大矩阵乘积有多快：没有正确答案的数字。",
        "nothing: a CPU's speed says nothing about an accelerator's",
        "没有：CPU 的速度说明不了加速器的速度",
    ),
    "micro_batches": (
        "一步中按微批次累积的梯度，其范数与 CPU 算出的相同。",
        "the CPU XLA device; on a v6e, where others reported wrong gradients, tpukit refuses them",
        "CPU XLA 设备；在 v6e 上有人报告过错误的梯度，tpukit 在那里拒绝使用",
    ),
    "libtpu_flag": (
        "libtpu 接受 MSHNet 交给其编译器的参数。",
        "libtpu 0.0.17 and 0.0.21, compiling without a TPU",
        "libtpu 0.0.17 和 0.0.21，没有 TPU，只编译",
    ),
    "out_of_memory": (
        "要的内存超过设备所有时，得到 tpukit 认识的错误，设备还能继续计算。",
        "the CPU XLA device, and messages from published reports",
        "CPU XLA 设备，以及公开报告里的错误信息",
    ),
}  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """A report, checked. Raises TpukitError, naming the file and what is wrong in it."""
    try:
        raw = path.read_bytes()
        _require(len(raw) <= MAX_BYTES, f"{len(raw)} bytes, more than {MAX_BYTES}")
        report = json.loads(raw.decode(), parse_constant=lambda word: _require(False, f"the number {word}"))
        _check(report)
    except (ValueError, RecursionError) as error:  # TpukitError is one
        raise TpukitError(f"{path.name} is not a report of `tpukit doctor --hardware`: {error}") from error
    return report


def _check(report: Any) -> None:
    _require(isinstance(report, dict) and report.get("format") == FORMAT, f"its format is not {FORMAT!r}")
    _require(report.get("rehearsal") is False, "it is a rehearsal, or does not say that it is none")
    _require(report.get("accelerator") in HARDWARE, f"its accelerator is none of {', '.join(HARDWARE)}")
    _require(report.get("host") in HOSTS, f"its host is none of {', '.join(HOSTS)}")
    _require(re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", str(report.get("date"))), "its date is no day")
    versions: Any = report.get("versions")
    _require(
        isinstance(versions, dict) and versions.keys() <= {*PACKAGES}, "its versions are of other packages"
    )
    chip = report.get("chip")
    _require(isinstance(chip, str) and NAME.fullmatch(chip), f"{str(chip)[:40]!r} is no name of a chip")
    for text in (report.get("tpukit"), report.get("python"), *versions.values()):
        _require(isinstance(text, str) and VERSION.fullmatch(text), f"{str(text)[:40]!r} is no version")
    _require("torch" in versions, "it names no version of torch")
    _require(type(report.get("chips")) is int and 0 < report["chips"] < 10_000, "its number of chips")
    checks: Any = report.get("checks")
    _require(isinstance(checks, list) and 0 < len(checks) <= 100, "its checks are no list")
    for row in checks:
        _require(isinstance(row, dict) and row.get("outcome") in (PASS, FAIL, INFO, SKIP), "an outcome")
        name, text = row.get("name"), row.get("text")
        _require(isinstance(name, str) and NAME.fullmatch(name), "the name of a check")
        is_plain = isinstance(text, str) and len(text) <= 500 and not UNPRINTABLE.search(text)
        _require(is_plain, f"the text of {name} is long or not plain")
        numbers = row.get("numbers", {})
        _require(isinstance(numbers, dict) and all(map(_is_number, numbers.values())), "a number")


def _is_number(value):
    return type(value) in (int, float) and abs(value) < 1e300  # NaN is not, and an int may be any


def _require(holds, what):
    if not holds:
        raise ValueError(what)


def plain(text: str) -> str:
    """A stranger's text for a cell of a Markdown table: no markup, no HTML, one line."""
    escaped = html.escape(" ".join(text.split()))
    return re.sub(r"([\\`*_{}\[\]()#+.!|~$^:@-])", r"\\\1", escaped)


def sentence(reports: list[dict[str, Any]], language: int) -> str:
    """The status sentence: where tpukit was seen. language: 0 for English, 1 for Chinese."""
    places = []
    for report in reports:
        outcomes = [row["outcome"] for row in report["checks"] if row["outcome"] in (PASS, FAIL)]
        counted = COUNTED[language].format(passed=outcomes.count(PASS), count=len(outcomes))
        places.append(f"{_machine(report)} ({_versions(report)}, {report['date']}, {counted})")
    if not places:
        return NOBODY[language]
    has_tpu = any(report["accelerator"] == "tpu" for report in reports)
    return SEEN[language].format("; ".join(places), "" if has_tpu else NO_TPU[language])


def table(reports: list[dict[str, Any]], language: int) -> str:
    """The table of the status page: a row for each check."""
    lines = [HEADS[language], "|---|---|---|"]
    for name, check in CHECKS.items():
        what = (check.assumes, ROWS[name][0])[language]
        seen = "<br>".join(_seen(name, reports, language)) or NOT_SEEN[language]
        lines.append(f"| {what} (`{name}`) | {seen} | {ROWS[name][1 + language]} |")
    return "\n".join(lines)


def _seen(name, reports, language) -> Iterator[str]:
    for report in reports:
        for row in report["checks"]:
            if row["name"] == name and row["outcome"] != SKIP:
                found = "" if row["outcome"] == PASS else f": {plain(row['text'])}"
                place = f"{_machine(report)}, {_versions(report)}, {report['date']}"
                yield f"{place}: {WORDS[row['outcome']][language]}{found}"


def _machine(report):
    return f"{report['chips']} x {plain(report['chip'])}"


def _versions(report):
    names = [name for name in ("torch", "torch_xla", "torch_tpu") if name in report["versions"]]
    return ", ".join(f"{name} {report['versions'][name]}".replace("_", "\\_") for name in names)


def seen(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What passed where, for seen.json."""
    entries = []
    for report in reports:
        held = {row["name"] for row in report["checks"] if row["outcome"] == PASS}
        passed = [name for name, checks in TRIED.items() if checks <= held]
        versions = {name: _minor(report["versions"].get(name)) for name in ("torch", "torch_xla")}
        if report.get("backend") != "torch_xla":
            versions["torch_xla"] = None
        if passed:
            entries.append(dict(chip=report["chip"], **versions, passed=passed))
    return entries


def _minor(version):
    return version and ".".join(map(str, release(version)))


def renew(root: Path = ROOT) -> list[Path]:
    """Bring the pages and seen.json below `root` up to date with its reports. Returns those that changed."""
    reports = [read(path) for path in sorted((root / "docs/hardware").glob("*.json"))]
    reports.sort(key=lambda report: report["date"])
    texts = {root / "tpukit/devices/seen.json": json.dumps(seen(reports)) + "\n"}
    for name, language in PAGES:
        text = (root / name).read_text(encoding="utf-8")
        text = _between("hardware", sentence(reports, language), text)
        texts[root / name] = _between("hardware table", table(reports, language), text)
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in changed:
        path.write_text(texts[path], encoding="utf-8")
    return changed


def _between(marker, text, page):
    begin, end = f"<!-- {marker} -->\n", f"<!-- end of {marker} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}{text}\n{end}", page, flags=re.DOTALL)


if __name__ == "__main__":
    try:
        for changed in renew():
            print(changed.relative_to(ROOT))
    except TpukitError as error:
        sys.exit(str(error))
